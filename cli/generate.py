"""`baton generate`: one prompt, its answer as it comes."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from cli.output import print_json, print_text, rounded_ms
from cli.target import Address, gateway_client
from common.client import Chat, Chunk, Completion, Prompt, Sampling
from common.errors import ConfigError, InternalError


def generate(
    prompt: Annotated[str | None, typer.Argument(help="the text to go on from")] = None,
    token_ids: Annotated[
        str | None, typer.Option(help="token ids instead of text, such as 1,2,3")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="put the prompt into the model's chat template")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=0, max=1 << 31, help="tokens to generate at most")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    top_p: Annotated[float | None, typer.Option(help="nucleus of the distribution")] = None,
    top_k: Annotated[int | None, typer.Option(help="most likely tokens; 0 is off")] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=(1 << 64) - 1, help="the same seed gives the same answer"),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="ends the answer; may be repeated")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after eos")] = False,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object at the end")] = False,
) -> None:
    """Generate from a prompt."""
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    chunks: list[Chunk] = []
    with gateway_client(address) as client:
        for chunk in client.generate(_prompt(prompt, token_ids, chat), sampling):
            chunks.append(chunk)
            if not as_json:
                print_text(chunk.text)
    complete = completion_of(chunks)
    if as_json:
        print_json(_as_dict(chunks, complete))
    else:
        print_text("\n")
        Console(stderr=True, highlight=False).print(_summary(complete), style="dim", soft_wrap=True)


def completion_of(chunks: list[Chunk]) -> Completion:
    complete = chunks[-1].complete if chunks else None
    if complete is None:
        raise InternalError("the answer ended without its last message")
    return complete


def _prompt(text: str | None, token_ids: str | None, chat: bool) -> Prompt:
    if text is None and token_ids is None:
        raise ConfigError("prompt", "give a text or --token-ids")
    if text is not None and token_ids is not None:
        raise ConfigError("prompt", "give a text or --token-ids, not both")
    if token_ids is not None:
        try:
            return [int(number) for number in token_ids.split(",")]
        except ValueError:
            raise ConfigError("token-ids", "must be numbers with commas between them") from None
    assert text is not None
    return Chat((("user", text),)) if chat else text


def _as_dict(chunks: list[Chunk], complete: Completion) -> dict[str, object]:
    return {
        "request_id": complete.request_id,
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "finish_reason": complete.finish_reason.value,
        "usage": asdict(complete.usage),
        "phases_ms": {k: rounded_ms(v) for k, v in asdict(complete.phases_ms).items()},
        "seed": complete.seed,
        "trace_id": complete.trace_id,
    }


def _summary(complete: Completion) -> str:
    usage, phases = complete.usage, complete.phases_ms
    return (
        f"{usage.prompt_tokens} + {usage.output_tokens} tokens, {complete.finish_reason.value};"
        f" first after {phases.time_to_first_token:.0f} ms, all after {phases.total:.0f} ms;"
        f" baton trace {complete.request_id}"
    )
