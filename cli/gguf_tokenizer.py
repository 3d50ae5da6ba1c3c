"""The tokenizer inside a GGUF file, as a `tokenizers` object.

A GGUF names its splitting of text into words (``tokenizer.ggml.pre``) instead of describing it.
transformers knows few of the names and falls back to GPT-2's splitting in silence, which tokenises
the digits of SmolLM2 otherwise than in its training; here an unknown name is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as split
from tokenizers.processors import TemplateProcessing

from common.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4
# The patterns of the two models' own tokenizer.json; \p{N}{1,3} and \p{N} are all they differ in.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises ModelError when the file has no tokenizer or one of an unknown kind."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            "model",
            "no tokenizer in the file"
            if kind is None
            else f"tokenizer.ggml.model {kind!r} is not gpt2; use the model's folder",
        )
    try:
        tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
        types: Sequence[int] = metadata["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        pre = metadata.get("tokenizer.ggml.pre", "default")
        vocab = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    except KeyError as error:
        raise ModelError("model", f"the file lacks {error.args[0]}") from None
    except Exception as error:  # the library raises nothing narrower for merges out of vocabulary
        raise ModelError("model", f"the file's tokenizer cannot be used: {error}") from error
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in template_variables(metadata):
        bos = template_variables(metadata)["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
        )
    return tokenizer


def template_variables(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens that chat templates may name."""
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ())
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def _pre_tokenizer(name: str) -> split.PreTokenizer:
    if name == "smollm":
        return split.Sequence(
            [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
        )
    if name in ("gpt-2", "default"):
        return split.ByteLevel(add_prefix_space=False)
    numbers = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
    if name not in numbers:
        raise ModelError(
            "model", f"tokenizer.ggml.pre {name!r} is not supported; use the model's folder"
        )
    words = Regex(_WORDS.format(number=numbers[name]))
    return split.Sequence(
        [
            split.Split(words, "isolated"),
            split.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
