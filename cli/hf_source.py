"""A Hugging Face folder as a model: config through transformers, weights linked, never copied."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli.model_config import check_family, check_tensors, normalise
from cli.model_source import EntryFacts, Progress
from cli.safetensors_file import read_shapes
from common.errors import ModelError

_SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "model.safetensors.index.json",
)  # fmt: skip
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class HuggingFaceSource:
    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.name = self.directory.name
        self._weights = self._find_weights()

    @property
    def files(self) -> list[Path]:
        side = [self.directory / name for name in _SIDE_FILES]
        return [path for path in side if path.exists()] + self._weights

    def write(self, directory: Path, progress: Progress) -> EntryFacts:
        progress("reading", 0, 1)
        config = self._config()
        check_tensors(config, read_shapes(self._weights))
        tokenizer = self.directory / "tokenizer.json"
        if not tokenizer.exists():
            raise ModelError("model", f"{self.directory} has no tokenizer.json")
        (directory / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        tokenizer_config = self._json("tokenizer_config.json")
        if template := self._template(tokenizer_config):
            (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        for path in self._weights:
            (directory / path.name).symlink_to(path)
        generation = self._json("generation_config.json")
        return EntryFacts(
            config=config,
            weight_files=tuple(path.name for path in self._weights),
            eos_token_ids=_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
            default_sampling={k: generation[k] for k in _SAMPLING if generation.get(k) is not None},
            template_variables=_token_texts(
                {**self._json("special_tokens_map.json"), **tokenizer_config}
            ),
        )

    def _find_weights(self) -> list[Path]:
        if not (self.directory / "config.json").is_file():
            raise ModelError("model", f"{self.directory} is not a model: it has no config.json")
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            weight_map = self._json(index.name).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelError("model", f"{index.name} has no weight_map")
            # Only names of the folder itself: an index is not to point anywhere else.
            paths = [self.directory / Path(str(n)).name for n in sorted(set(weight_map.values()))]
        else:
            paths = [self.directory / "model.safetensors"]
        for path in paths:
            if not path.is_file():
                raise ModelError("model", f"{self.directory} lacks the weights file {path.name}")
        return paths

    def _config(self) -> dict[str, Any]:
        raw = self._json("config.json")
        check_family(raw)
        # 2 s and hundreds of MB to import: only `prepare` does, and only for folders.
        from transformers import AutoConfig

        try:
            loaded = AutoConfig.from_pretrained(str(self.directory), trust_remote_code=False)
            config = loaded.to_dict()
        except Exception as error:  # anything: the folder is foreign and transformers is large
            raise ModelError("model", f"config.json cannot be used: {error}") from error
        config["dtype"] = str(config.get("dtype") or "float32").removeprefix("torch.")
        return normalise(config)

    def _template(self, tokenizer_config: Mapping[str, Any]) -> str | None:
        path = self.directory / "chat_template.jinja"
        if path.exists():
            return path.read_text(encoding="utf-8")
        template = tokenizer_config.get("chat_template")
        if isinstance(template, list):
            named = {item.get("name"): item.get("template") for item in template}
            template = named.get("default")
        return str(template) if template else None

    def _json(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        if not path.exists():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError("model", f"cannot read {path}: {error}") from None
        if not isinstance(content, dict):
            raise ModelError("model", f"{path} holds no JSON object")
        return content


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(i) for i in (value if isinstance(value, list) else [value]))


def _token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for name in _TOKEN_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    return texts
