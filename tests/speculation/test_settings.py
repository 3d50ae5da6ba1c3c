"""What cannot speculate is refused at start, by the setting's name."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.default_model import default_entry

from common.config import DecodeSettings, load
from common.errors import ConfigError
from engine.models.config import read_entry
from worker.speculation import _check_same_tokens, _num_blocks, make_speculator


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculation": "fast"}, "speculation: must be off, ngram, draft=DIR"),
        ({"speculation": "draft="}, "speculation: must be off"),
        ({"speculation": "draft=self:0"}, "speculation: self:N needs a number of layers, not '0'"),
        ({"speculation": "draft=self:x"}, "speculation: self:N needs a number"),
        ({"num_speculative_tokens": "0"}, "num_speculative_tokens: must be at least 1"),
        ({"num_speculative_tokens": "-3"}, "num_speculative_tokens: must be at least 1"),
        ({"num_speculative_tokens": "17"}, "num_speculative_tokens: must be at most 16"),
        (
            {"speculation": "ngram", "num_speculative_tokens": 8, "max_num_batched_tokens": 8},
            "num_speculative_tokens: must be less than max_num_batched_tokens",
        ),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min: must be at most"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min: must be at least 1"),
        ({"speculation": "auto", "async_depth": 1}, "async_depth: must be 0 with speculation"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(DecodeSettings, settings)


@pytest.mark.parametrize("name", ["off", "ngram", "auto", "draft=self:10", "draft=/some/where"])
def test_settings_that_can(name: str) -> None:
    assert load(DecodeSettings, {"speculation": name}).speculation == name


def copy_of_default(directory: Path) -> Path:
    """Its entry without the weights, which nobody reads here."""
    directory.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(default_entry() / name, directory)
    return directory


def test_another_tokenizer_or_vocabulary_is_refused(tmp_path: Path) -> None:
    target = read_entry(default_entry())
    same = copy_of_default(tmp_path / "same")
    _check_same_tokens(target, read_entry(same))
    tokenizer = json.loads((same / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (same / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="tokenizer is not the target's"):
        _check_same_tokens(target, read_entry(same))
    (same / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer is not the target's"):
        _check_same_tokens(target, read_entry(same))
    config = json.loads((same / "config.json").read_text())
    config["vocab_size"] += 64
    (same / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="vocabulary has 49216 tokens, the target's 49152"):
        _check_same_tokens(target, read_entry(same))


def test_a_draft_that_does_not_fit_is_refused() -> None:
    entry = read_entry(default_entry())
    layout: Any = SimpleNamespace(block_bytes=1 << 20)
    with pytest.raises(ConfigError, match="draft_kv_cache_memory_bytes: a block of the draft"):
        _num_blocks(load(DecodeSettings, {"draft_kv_cache_memory_bytes": "2MiB"}), entry, layout)
    with pytest.raises(ConfigError, match=r"draft_kv_cache_memory_bytes: .* available"):
        _num_blocks(load(DecodeSettings, {"draft_kv_cache_memory_bytes": "9TiB"}), entry, layout)


def test_a_model_without_weights_takes_no_draft_model() -> None:
    settings = load(DecodeSettings, {"speculation": "draft=self:2", "model": "oracle"})
    model: Any = SimpleNamespace(entry=None)
    nothing: Any = None
    with pytest.raises(ConfigError, match="speculation: oracle has no weights"):
        make_speculator(settings, model, nothing, nothing, lambda: 0.0)
