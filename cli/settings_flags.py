"""Flags made from the settings of common/config.py: a setting is declared once, there."""

import inspect
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from common.config import ProcessSettings
from common.sizes import SIZE, format_bytes

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings; also BATON_CONFIG")
]


class SettingsCommand(TyperCommand):
    """Its help has no frames: in their columns the names of settings would be cut."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "rich_markup_mode": None})


def with_settings(
    *kinds: type[ProcessSettings], without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a flag for each setting of ``kinds``, which it receives as ``**settings``:
    text or a bool, None where not given. `common.config.load` parses and checks them."""
    fields: dict[str, FieldInfo] = {}
    for kind in kinds:
        fields |= {n: f for n, f in kind.model_fields.items() if n not in without}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]

        def command(**values: Any) -> None:
            function(**values)

        made: Any = command
        made.__name__, made.__doc__ = function.__name__, function.__doc__
        made.__signature__ = inspect.Signature([*own, *map(_parameter, fields, fields.values())])
        return command

    return decorate


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    text = (field.description or "") + _default(field)
    annotation: Any
    if field.annotation is bool:
        option = typer.Option(f"{flag}/--no-{flag[2:]}", help=text)
        annotation = Annotated[bool | None, option]
    else:
        metavar = "SIZE" if SIZE in field.metadata else _metavar(field.annotation)
        option = typer.Option(flag, help=text, metavar=metavar)
        annotation = Annotated[str | None, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _default(field: FieldInfo) -> str:
    default = field.get_default()
    # A factory's default is another one each time, and None is explained by the text.
    if default is None or default == "" or field.default_factory is not None:
        return ""
    if SIZE in field.metadata:
        default = format_bytes(default).replace(".00", "")
    return f" (default: {default})"


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is types.UnionType:
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if values := getattr(annotation, "__members__", None):
        return "|".join(member.value for member in values.values())
    return {int: "N", float: "X", Path: "PATH"}.get(annotation, "TEXT")
