"""plan: the arithmetic of memory from a config alone."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.main import main
from cli.model_shape import read_shape
from cli.plan import make_plan
from common.errors import ConfigError, ModelError
from common.sizes import format_bytes, parse_bytes

DATA = Path(__file__).parents[2] / "bench/data"
LLAMA_13B, LLAMA_8B = DATA / "llama-2-13b.json", DATA / "llama-3.1-8b.json"

Baton = Callable[..., tuple[int, str, str]]


@pytest.fixture
def baton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Baton:
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["baton", "plan", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return run


def config(tmp_path: Path, **fields: object) -> Path:
    base = json.loads(LLAMA_8B.read_text())
    (tmp_path / "config.json").write_text(json.dumps({**base, **fields}))
    return tmp_path


def test_a_13b_model_takes_65_percent_of_40_gb_before_any_user_connects(baton: Baton) -> None:
    model = ("--model", str(LLAMA_13B), "--prompt", "1000", "--output", "300", "--json")
    code, out, _ = baton(*model, "--memory", "40GB", "--gpu-memory-utilization", "1.0")
    made = json.loads(out)
    assert code == 0 and made["num_parameters"] == 13_015_864_320
    assert made["weight_bytes"] == pytest.approx(26e9, rel=0.002)
    assert made["weight_share"] == pytest.approx(0.65, abs=0.002)
    # "The other 35 % hold every request's KV": 800 KiB a token (PagedAttention, section 3).
    assert made["kv_budget_bytes"] == pytest.approx(0.35 * 40e9, rel=0.005)
    assert made["kv_bytes_per_token"] == 800 << 10
    # 40 GiB, which is what the card has: 61 %.
    assert json.loads(baton(*model, "--memory", "40GiB")[1])["weight_share"] < 0.61


def test_blocks_and_requests_of_a_plan() -> None:
    made = make_plan(read_shape(LLAMA_8B), 80 << 30, (1000, 300))
    budget = int((80 << 30) * 0.9) - made.weight_bytes
    assert made.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert made.num_blocks == budget // (16 * 131072) - 1  # the null block
    assert made.blocks_per_request == 82  # 1,299 tokens are stored
    assert made.paged_requests == made.num_blocks // 82
    assert made.contiguous_requests == budget // (131072 * 131072) == 3
    short = make_plan(read_shape(LLAMA_8B), 80 << 30, (1000, 300), max_model_len=2048)
    assert short.contiguous_requests > 200 and short.paged_requests == made.paged_requests


@pytest.mark.parametrize(
    ("fields", "num_parameters"),
    [
        ({}, 8_030_261_248),  # Llama-3.1-8B
        (
            {  # SmolLM2-135M: tied head
                "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
                "tie_word_embeddings": True,
            },
            134_515_008,
        ),
        (
            {  # Qwen2.5-0.5B: biases on q, k and v
                "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
                "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
                "vocab_size": 151936, "tie_word_embeddings": True,
            },
            494_032_768,
        ),
        (
            {  # Qwen3-0.6B: norms on q and k, heads wider than the model
                "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
                "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                "vocab_size": 151936, "tie_word_embeddings": True, "head_dim": 128,
            },
            596_049_920,
        ),
    ],
    ids=["llama", "smollm2", "qwen2", "qwen3"],
)  # fmt: skip
def test_parameters_are_the_published_counts(
    tmp_path: Path, fields: dict[str, object], num_parameters: int
) -> None:
    assert read_shape(config(tmp_path, **fields)).num_parameters() == num_parameters


def test_a_prepared_entry_is_named_by_itself(tmp_path: Path) -> None:
    entry = config(tmp_path, baton={"name": "mine"}, dtype="float32", torch_dtype=None)
    shape = read_shape(entry)
    assert (shape.name, shape.dtype) == ("mine", "float32")
    assert shape.kv_bytes_per_token() == 2 * shape.kv_bytes_per_token("bfloat16")


def test_text_says_what_fits(baton: Baton) -> None:
    asked = ("--memory", "80GiB", "--prompt", "1000", "--output", "300")
    code, out, _ = baton("--model", str(LLAMA_8B), *asked)
    assert code == 0
    for text in ("llama-3.1-8b, bfloat16, 8.03 B", "18.7 %", "128.00 KiB", "131,072 tokens"):
        assert text in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["--memory", "16GiB"],
            "14.40 GiB, less 14.96 GiB of weights, leaves no block of 2.00 MiB",
        ),
        (["--prompt", "131072"], "prompt: 131072 + 300 output tokens are more than the longest"),
        (["--max-model-len", "1024"], "prompt: 1000 + 300 output tokens are more than the longest"),
        (["--memory", "lots"], "memory: 'lots' is not a size"),
        (["--dtype", "fp8"], "dtype: fp8; give one of these: float32, float16, bfloat16"),
        (["--model", "/nowhere"], "model: cannot read /nowhere"),
        (["--model", str(DATA / "README.md")], "is not JSON"),
    ],
)
def test_what_cannot_be_is_refused_with_the_arithmetic(
    baton: Baton, changes: list[str], message: str
) -> None:
    asked = ["--model", str(LLAMA_8B), "--memory", "80GiB", "--prompt", "1000", "--output", "300"]
    code, out, err = baton(*asked, *changes)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


def test_models_that_we_do_not_serve_are_refused_by_field(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model_type 'gpt2' is not supported"):
        read_shape(config(tmp_path, model_type="gpt2"))
    with pytest.raises(ModelError, match="num_hidden_layers"):
        read_shape(config(tmp_path, num_hidden_layers="many"))
    shape = read_shape(config(tmp_path, torch_dtype=None))
    with pytest.raises(ConfigError, match="none is named"):
        shape.kv_bytes_per_token()


def test_sizes() -> None:
    sizes = {"80GiB": 80 << 30, "40GB": 40 * 10**9, "1.5 MiB": 3 << 19, "4096": 4096, "2k": 2000}
    for text, num_bytes in sizes.items():
        assert parse_bytes(text, "memory") == num_bytes
    for text in ("", "-1", "0", "GiB", "8iB", "1e9", "9" * 40, "1 GiB GiB"):
        with pytest.raises(ConfigError, match="memory"):
            parse_bytes(text, "memory")
    assert [format_bytes(n) for n in (12, 2048, 3 << 30)] == ["12 B", "2.00 KiB", "3.00 GiB"]
