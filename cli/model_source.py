"""What `baton prepare` needs from a kind of model on disk (a folder, a GGUF file)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

# (what is being done, bytes done, bytes in all)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """What a source found out; files that it has written or linked are in the entry already.
    ``config`` is normalised. ``default_sampling`` has the names of SamplingParams."""

    config: Mapping[str, Any]
    weight_files: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    template_variables: Mapping[str, str] = field(default_factory=dict)


class ModelSource(Protocol):
    @property
    def name(self) -> str:
        """What clients call the model."""

    @property
    def files(self) -> list[Path]:
        """Every file that the entry depends on."""

    def write(self, directory: Path, progress: Progress) -> EntryFacts:
        """Fills a fresh entry: tokenizer.json, chat_template.jinja if there is one, weights."""
