"""Data that programs do not compute: in a file beside the module that reads it."""

from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def beside(module: str, kind: type[T]) -> T:
    """The data in the TOML file with a module's name, its `__file__`; checked to be a `kind`."""
    return msgspec.toml.decode(Path(module).with_suffix(".toml").read_bytes(), type=kind)


def statements(module: str) -> tuple[str, ...]:
    """The statements in the SQL file with a module's name, its `__file__`."""
    text = Path(module).with_suffix(".sql").read_text(encoding="utf-8")
    return tuple(each.strip() for each in text.split(";") if each.strip())
