"""The prompts of the goldens: varied text, and lengths around multiples of the block size."""

from collections.abc import Callable

_STORY = (
    "The relay team trained on the old cinder track behind the mill. Mara ran the first leg, "
    "because she could start faster than anyone in the valley, and Jonas ran the last, because "
    "he never looked back. Between them stood Ines and the quiet boy whom everybody called "
    "Second. They had dropped the baton twice in the spring, once in the rain and once in "
    "bright sunshine, and nobody could say which was worse. "
)
_CODE = '''\
def merge(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
'''
_TABLE = "".join(
    f"{year},{year * 7 % 1000},{year * 13 % 97}.{year % 10}\n" for year in range(1990, 2040)
)
_LOG = "".join(
    f"2024-03-{day:02d}T{day % 24:02d}:17:{day * 2:02d}Z worker-{day % 4} step={day * 111} ok\n"
    for day in range(1, 29)
)
_REPORT = "".join(
    f"Section {n}. In week {n} the northern station measured {n * 37 % 100} mm of rain and "
    f"{n * 5 % 30} degrees at noon; the keeper noted a wind from the {wind}.\n"
    for n, wind in enumerate(["north", "east", "south", "west"] * 12, start=1)
)


def _chat(question: str) -> str:
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        f"Face<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


# name: (text, number of tokens to keep; None keeps all)
_TEXTS: dict[str, tuple[str, int | None]] = {
    "one-token": ("The", None),
    "two-tokens": ("Once upon", None),
    "capital-of-france": (_chat("What is the capital of France?"), None),
    "chat-list": (_chat("Name three planets that have rings."), None),
    "chat-arithmetic": (_chat("What is 17 times 23? Think step by step."), None),
    "code": (_CODE, None),
    "code-open": ("#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i <", None),
    "json": ('{"name": "Ada", "born": 1815, "works": ["Notes on the Analytical', None),
    "digits": (
        "Call 555-0134 or 555-0178. Orders 48213, 99127 and 30556 shipped on 2024-11-05 at",
        None,
    ),
    "table": (_TABLE, 400),
    "log-lines": (_LOG, None),
    "emoji": ("Today was great 🎉🎂 we ate cake 🍰 and danced 💃🕺 until 🌙 then", None),
    "german": ("Über den Wolken muss die Freiheit wohl grenzenlos sein, und wer", None),
    "chinese": ("北京是中国的首都。它有着悠久的历史。长城位于", None),
    "arabic": ("السلام عليكم، كيف حالك اليوم؟ أنا", None),
    "russian": ("Москва — столица России. Население города", None),
    "whitespace": (" \n\n\t  \n", None),
    "length-15": (_STORY, 15),
    "length-16": (_STORY, 16),
    "length-17": (_STORY, 17),
    "length-32": (_STORY, 32),
    "length-33": (_STORY, 33),
    "length-511": (_REPORT, 511),
    "length-1500": (_REPORT, 1500),
}


def prompts(encode: Callable[[str], list[int]]) -> dict[str, list[int]]:
    """Token ids by name."""
    ids = {name: encode(text)[:length] for name, (text, length) in _TEXTS.items()}
    for name, (_, length) in _TEXTS.items():
        assert ids[name] and length in (None, len(ids[name])), name
    return ids
