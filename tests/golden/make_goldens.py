"""Makes the greedy goldens of the default model with transformers' own `generate`, in fp32.

    PYTHONPATH=.:tests python -m golden.make_goldens ENTRY      writes tests/golden/smollm2.json

ENTRY is what `baton prepare` prints. The end-of-text ids do not end the text, so that each prompt
gives 64 tokens. Beside each id stand the two best scores (raw logits), for the tie rule of
invariant I2 of docs/design.md, and the second-best id.
"""

import json
import sys
from pathlib import Path
from typing import Any

from golden.prompts import prompts
from support.parity import GOLDENS, Golden, save_goldens
from tokenizers import Tokenizer

NUM_TOKENS = 64


def make_goldens(entry: Path) -> list[Golden]:
    import torch
    import transformers

    tokenizer = Tokenizer.from_file(str(entry / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(entry, dtype=torch.float32).eval()
    named = prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    return [_golden(model, name, prompt_ids) for name, prompt_ids in named.items()]


def _golden(model: Any, name: str, prompt_ids: list[int]) -> Golden:
    import torch

    output = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits).float().topk(2)
    token_ids = output.sequences[0, len(prompt_ids) :].tolist()
    assert best.indices[:, 0].tolist() == token_ids
    return Golden(
        name=name,
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        second_ids=best.indices[:, 1].tolist(),
        best_scores=[round(score, 5) for score in best.values[:, 0].tolist()],
        second_scores=[round(score, 5) for score in best.values[:, 1].tolist()],
    )


def main() -> None:
    entry = Path(sys.argv[1])
    goldens = make_goldens(entry)
    fingerprint = json.loads((entry / "config.json").read_text())["baton"]["fingerprint"]
    save_goldens(goldens, fingerprint)
    tokens = sum(len(golden.token_ids) for golden in goldens)
    print(f"{len(goldens)} prompts, {tokens} tokens -> {GOLDENS}")


if __name__ == "__main__":
    main()
