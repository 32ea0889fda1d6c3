"""From what a person gives as a model to a Hugging Face folder on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import UserError

FORMS = "a Hugging Face folder, a .gguf file, or OWNER/NAME[@REVISION] of the hub"
"""What a person may give, for the help of options."""

_HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]{1,200}))?"
)
_HERE = ("/", "./", "../", "~")
"""Beginnings that only a path on this machine has."""


@dataclass(frozen=True)
class Model:
    """A model on this machine."""

    folder: Path
    """With config.json, tokenizer and safetensors."""
    name: str
    """As it was given; of the hub, with the commit: OWNER/NAME@COMMIT."""

    @property
    def title(self) -> str:
        """A short name for people."""
        return self.name.partition("@")[0] if is_hub_name(self.name) else self.folder.resolve().name


def hub_name(text: str) -> tuple[str, str | None] | None:
    """Name and revision of OWNER/NAME or OWNER/NAME@REVISION; None for other texts."""
    found = None if text.startswith(_HERE) else _HUB_NAME.fullmatch(text)
    return None if found is None else (found["name"], found["revision"])


def is_hub_name(text: str) -> bool:
    """Whether a text has the form of a name of the hub, OWNER/NAME or OWNER/NAME@REVISION."""
    return hub_name(text) is not None


def find_model(given: str | Path, option: str, *, weights: bool = True) -> Model:
    """The folder of a model: given as a folder, a GGUF file, or `OWNER/NAME[@REVISION]`.

    What is on the hub is downloaded into its cache (`HF_HOME`) once, with a progress bar; a GGUF
    file is converted once. `option` begins the sentence of an error: `--model`. Without `weights`
    only config and tokenizer are fetched. Raises `UserError`.
    """
    text = str(given)
    path = Path(text)
    try:
        path = path.expanduser()
        is_folder = text != "" and path.is_dir()
    except (OSError, RuntimeError):  # too long, or no such user
        raise UserError(f"{option} {text[:300]} is no folder; give {FORMS}") from None
    if is_folder:
        return Model(path, text)
    if text and path.is_file() and path.suffix.lower() == ".gguf":
        from peers.models.gguf import converted

        return Model(converted(path, option), text)
    named = hub_name(text)
    if named is None or path.exists():
        raise UserError(
            f"{option} {text[:300]} is {'a file' if path.is_file() else 'no folder'}; give {FORMS}"
        )
    from peers.models.hub import download

    return download(*named, option, weights=weights)
