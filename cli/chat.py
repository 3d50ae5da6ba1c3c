"""`baton chat`: a conversation in the terminal."""

from typing import Annotated

import typer
from rich.console import Console

from cli.output import print_text
from cli.target import Address, gateway_client
from common.client import Chat, Sampling, SyncBatonClient
from common.errors import BatonError

_LEAVE = ("/exit", "/quit")


def chat(
    system: Annotated[str | None, typer.Option(help="the system message")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="tokens of one answer at most")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same answers")] = None,
    address: Address = None,
) -> None:
    """Talk to the model; an empty line, /exit or Ctrl-D ends it."""
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    messages = [("system", system)] if system else []
    console = Console(stderr=True, highlight=False)
    with gateway_client(address) as client:
        while (text := _read(console)) is not None:
            messages.append(("user", text))
            try:
                messages.append(("assistant", _answer(client, messages, sampling)))
            except BatonError as error:
                # The conversation goes on without what could not be answered.
                messages.pop()
                console.print(f"error: {error.message}", style="red", markup=False)


def _read(console: Console) -> str | None:
    try:
        text = console.input("[bold]> [/bold]").strip()
    except EOFError:
        return None
    return None if not text or text in _LEAVE else text


def _answer(client: SyncBatonClient, messages: list[tuple[str, str]], sampling: Sampling) -> str:
    text = ""
    for chunk in client.generate(Chat(tuple(messages)), sampling):
        text += chunk.text
        print_text(chunk.text)
    print_text("\n")
    return text
