"""Comparison with the greedy goldens, under the tie rule of invariant I2 of docs/design.md.

The life of a comparison::

    check = ParityCheck()
    for golden in load_goldens():
        start = 0
        while start is not None:
            # The system under test continues prompt_ids + token_ids[:start] by num_after(start)
            # tokens, greedily; where start > 0 through its own resume.
            token_ids = generate(golden, start)
            start = check.compare(golden, token_ids, start)
    check.finish()

A different id is a tie only where the reference's two best scores differ by less than 1e-3 and the
id is the reference's second. It is printed, and the comparison goes on behind the reference's own
id. At most max(1, 0.5 %) of all compared tokens may be ties.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

GOLDENS = Path(__file__).parents[1] / "golden" / "smollm2.json"
TIE_GAP = 1e-3
TIE_SHARE = 0.005


@dataclass(frozen=True)
class Golden:
    """A prompt and the reference's greedy continuation; the scores are raw logits."""

    name: str
    prompt_ids: list[int]
    token_ids: list[int]
    second_ids: list[int]
    best_scores: list[float]
    second_scores: list[float]

    def num_after(self, start: int) -> int:
        return len(self.token_ids) - start

    def gap(self, index: int) -> float:
        return self.best_scores[index] - self.second_scores[index]


@dataclass
class ParityCheck:
    """Ties and tokens over all prompts of one comparison."""

    num_compared: int = 0
    ties: list[str] = field(default_factory=list)

    def compare(self, golden: Golden, token_ids: Sequence[int], start: int = 0) -> int | None:
        """``token_ids``: all that came after ``golden.token_ids[:start]``. Returns where to go on
        after a tie (see above), None at the end. AssertionError where it is no tie."""
        expected = golden.token_ids[start:]
        if len(token_ids) != len(expected):
            raise AssertionError(
                f"{golden.name}: {len(token_ids)} tokens after {start}, expected {len(expected)}"
            )
        for index, (got, wanted) in enumerate(zip(token_ids, expected, strict=True), start):
            self.num_compared += 1
            if got != wanted:
                self._tie(golden, index, got)
                return index + 1 if index + 1 < len(golden.token_ids) else None
        return None

    def finish(self) -> None:
        """Prints every tie and fails if there were too many."""
        for tie in self.ties:
            print(tie)
        allowed = max(1, int(TIE_SHARE * self.num_compared))
        if len(self.ties) > allowed:
            raise AssertionError(
                f"{len(self.ties)} ties in {self.num_compared} tokens, at most {allowed} allowed"
            )

    def _tie(self, golden: Golden, index: int, got: int) -> None:
        gap = golden.gap(index)
        text = (
            f"{golden.name}[{index}]: {got} instead of {golden.token_ids[index]}; "
            f"the reference's second is {golden.second_ids[index]}, {gap:.6f} behind"
        )
        if gap >= TIE_GAP or got != golden.second_ids[index]:
            raise AssertionError(f"not a tie: {text}")
        self.ties.append(f"tie: {text}")


def load_goldens(names: Sequence[str] | None = None) -> list[Golden]:
    """All goldens, or those named."""
    content = json.loads(GOLDENS.read_text(encoding="utf-8"))
    goldens = [Golden(**fields) for fields in content["goldens"]]
    if names is None:
        return goldens
    by_name = {golden.name: golden for golden in goldens}
    return [by_name[name] for name in names]


def save_goldens(goldens: Sequence[Golden], fingerprint: str) -> None:
    """Written one golden a line group, so that a change shows as a small diff."""
    lines = ",\n".join(json.dumps(asdict(golden)) for golden in goldens)
    GOLDENS.write_text(
        f'{{"model_fingerprint": "{fingerprint}",\n"goldens": [\n{lines}\n]}}\n', encoding="utf-8"
    )
