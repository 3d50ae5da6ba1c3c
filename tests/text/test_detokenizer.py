"""Incremental text: every character once, none cut, no stop string leaked, however tokens come."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.detokenizer import Detokenizer, _StopStrings

END = "<|end|>"


def byte_tokenizer() -> Tokenizer:
    """Every byte a token, a few merges, one special token: characters are cut wherever possible."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "b")]
    vocab = {text: i for i, text in enumerate([*alphabet, "th", "the", "Ġthe", "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer


TOKENIZER = byte_tokenizer()
TEXT = st.text(alphabet=st.sampled_from("abthe né中🎉👩‍👩‍👧\n"), max_size=40)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def run(ids: list[int], sizes: list[int], detokenizer: Detokenizer) -> tuple[list[str], int]:
    """Pushes ``ids`` in groups; the deltas, and how many tokens were used."""
    deltas, used, start = [], 0, 0
    for size in [*sizes, len(ids)]:
        delta = detokenizer.push(ids[start : start + size])
        deltas.append(delta.text)
        used += delta.num_tokens
        start += size
        if delta.stop is not None:
            return deltas, used
    deltas.append(detokenizer.finish())
    return deltas, used


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: output ends at the first character that completes a stop string."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(TEXT, st.lists(st.integers(1, 4), max_size=20))
def test_deltas_join_to_the_text_and_cut_no_character(text: str, sizes: list[int]) -> None:
    deltas, used = run(ids_of(text), sizes, Detokenizer(TOKENIZER))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert used == len(ids_of(text))


@given(
    TEXT,
    st.lists(st.integers(1, 4), max_size=20),
    st.lists(st.text(alphabet="abthe n中", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=300)
def test_stop_strings_end_the_text_where_they_are_completed(
    text: str, sizes: list[int], stops: list[str], include: bool
) -> None:
    expected, stop = cut(text, stops, include)
    detokenizer = Detokenizer(TOKENIZER, stop=stops, include_stop_str_in_output=include)
    deltas, used = run(ids_of(text), sizes, detokenizer)
    assert "".join(deltas) == expected
    shown = ""
    for delta in deltas:
        shown += delta
        assert expected.startswith(shown), "a character leaked that had to be taken back"
    if stop is None:
        assert used == len(ids_of(text))
    else:
        # One token fewer does not hold the stop string yet.
        ids = ids_of(text)
        assert cut(TOKENIZER.decode(ids[:used]).rstrip("\ufffd"), stops, include)[1] == stop
        assert cut(TOKENIZER.decode(ids[: used - 1]).rstrip("\ufffd"), stops, include)[1] is None


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["abe"])
    assert detokenizer.push(ids_of("nab")).text == "n"
    assert detokenizer.push(ids_of("t")).text == "abt"
    assert detokenizer.push(ids_of("ab")).text == ""
    assert detokenizer.finish() == "ab"


def test_nothing_follows_a_stop_string() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["e"])
    delta = detokenizer.push(ids_of("n e n"))
    assert (delta.text, delta.num_tokens, delta.stop) == ("n ", 3, "e")
    assert detokenizer.push(ids_of("n")).text == ""
    assert detokenizer.push(ids_of("n")).num_tokens == 0
    assert detokenizer.finish() == ""


def test_stop_strings_are_not_looked_for_within_min_tokens() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["n"], min_tokens=2)
    delta = detokenizer.push(ids_of("nnann"))
    assert (delta.text, delta.num_tokens) == ("nna", 4)


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, f"a{END}b")])
def test_special_tokens_are_text_only_on_request(skip: bool, text: str) -> None:
    ids = [*ids_of("a"), TOKENIZER.token_to_id(END), *ids_of("b")]
    deltas, _ = run(ids, [1, 1], Detokenizer(TOKENIZER, skip_special_tokens=skip))
    assert "".join(deltas) == text


def test_a_character_whose_end_never_comes_is_dropped() -> None:
    ids = ids_of("n🎉")
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(ids[:-1]).text == "n"
    assert detokenizer.finish() == ""


def test_bytes_that_are_no_text_hold_up_nothing() -> None:
    """A model may emit bytes that never become a character: text goes on behind them."""
    continuation = ids_of("é")[1:]
    detokenizer = Detokenizer(TOKENIZER)
    text = detokenizer.push(continuation * 100).text
    assert text.count("\ufffd") >= 90
    text = detokenizer.push(ids_of("né 🎉")).text
    assert text.endswith("né 🎉")


def test_many_special_tokens_cost_no_text_and_lose_none() -> None:
    end = TOKENIZER.token_to_id(END)
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push([*ids_of("a"), *[end] * 500]).text == "a"
    assert detokenizer.push(ids_of(" the")).text == " the"


def test_the_first_token_joins_the_prompt() -> None:
    """A sentencepiece-like decoder drops the first space of a text, but not one after a prompt."""
    vocab = {"▁Paris": 0, "▁is": 1, "▁": 2}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.Metaspace()
    assert Detokenizer(tokenizer).push([0]).text == "Paris"
    assert Detokenizer(tokenizer, prompt_ids=[1]).push([0]).text == " Paris"


def test_bytes_that_change_earlier_text_are_survived() -> None:
    """ByteFallback turns a whole run of bytes into replacements when a bad one joins it."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"ab": 256}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([*"中".encode()]).text == "中"
    assert detokenizer.push([0xFF, 0xFF, 256]).text.endswith("ab")
    assert detokenizer.push([256]).text == "ab"


def test_without_a_tokenizer_there_is_no_text() -> None:
    delta = Detokenizer(None).push([1, 2, 3])
    assert (delta.text, delta.num_tokens, delta.stop) == ("", 3, None)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(seed: int) -> None:
    rng = random.Random(seed)
    stops = ["".join(rng.choices("ab", k=rng.randint(1, 9))) for _ in range(3)]
    machine = _StopStrings(stops, include=False)
    text = shown = ""
    while machine.matched is None and len(text) < 200:
        piece = "".join(rng.choices("abc", k=rng.randint(0, 4)))
        text += piece
        shown += machine.push(piece, look=True)
        if machine.matched is None:
            held = max(
                n for n in range(len(text) + 1)
                if n == 0 or any(len(s) > n and s.startswith(text[-n:]) for s in stops)
            )  # fmt: skip
            assert (shown, machine.held) == (text[: len(text) - held], text[len(text) - held :])


def test_long_stop_strings_cost_no_more_for_what_is_held_back() -> None:
    stops = ["b" + chr(0x4E00 + i) * 1022 for i in range(15)] + ["a" * 1023 + "b"]
    machine = _StopStrings(stops, include=False)
    machine.push("a" * 1000, look=True)
    began_s = time.thread_time()
    for _ in range(200):
        machine.push("a", look=True)
    assert time.thread_time() - began_s < 0.2  # 1.2 s when each looks at all that is held
