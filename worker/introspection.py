"""A worker's statistics as JSON."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


def to_json(value: object) -> Json:
    """Dataclasses, mappings and sequences, nested; a compound key becomes ``a.b``."""
    if isinstance(value, Enum):
        return str(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_name(key): to_json(entry) for key, entry in value.items()}
    assert isinstance(value, list | tuple), type(value)
    return [to_json(entry) for entry in value]


def _name(key: object) -> str:
    if isinstance(key, tuple):
        return ".".join(_name(part) for part in key)
    return str(key.value) if isinstance(key, Enum) else str(key)
