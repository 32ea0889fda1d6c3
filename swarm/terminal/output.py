"""What commands print for programs: JSON, on standard output or in a file."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from swarm.errors import UserError, file_errors

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON that every parser accepts: numbers that are not finite become null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def print_lines(lines: Iterable[Text], console: Console) -> None:
    """Print lines, cut between words on a terminal that is narrower. One with a longer word, such
    as an id, is left to the terminal, so that it can be copied whole."""
    for line in lines:
        word = max(map(len, line.plain.split()), default=0)
        whole = not console.is_terminal or word > console.width
        console.print(line, soft_wrap=whole)


STANDARD_OUTPUT = Path("-")
"""File name that stands for standard output. All other output then goes to standard error."""


def plain(value: Any) -> Any:
    """Convert structures to dictionaries and bytes to hexadecimal text, recursively."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    return value


def print_json(told: Any) -> None:
    """Print an object for a program to read."""
    print(to_json(told, indent=2), flush=True)


def write_json(option: str, told: Any, path: Path) -> None:
    """Write an object to the file that an option names, or print it; raises `UserError`."""
    write_text(option, to_json(told, indent=2), path)


def write_text(option: str, text: str, path: Path) -> None:
    """Write text to the file that an option names, or print it; raises `UserError`."""
    if path == STANDARD_OUTPUT:
        print(text, flush=True)
        return
    with file_errors(f"{option} {path}", "written"):
        path.write_text(text + "\n" if text else "", encoding="utf-8")


def check_writable(option: str, path: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    """Raise `UserError` if a file could not be written. Called before a command does its work."""
    if path is None or (path == STANDARD_OUTPUT and not suffixes):
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise UserError(f"{option} {path} must end with {' or '.join(suffixes)}")
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path} cannot be written: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option} {path} cannot be written: no permission")


@contextmanager
def removed_on_failure(folder: Path, keep: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Remove a folder that did not exist before the block, and those made above it, if it fails.

    `keep`: whether what is in the folder is worth keeping all the same."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except Exception:
        if missing and not keep():
            shutil.rmtree(missing[-1], ignore_errors=True)
        raise


def say_json(event: dict[str, Any]) -> None:
    """Print an event of a long command as a line of JSON."""
    print(to_json(event), flush=True)


def say_event(event: dict[str, Any]) -> None:
    """Print an event of a long command for people: its name, then its fields."""
    words = " ".join(
        f"{name.replace('_', ' ')} {f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in event.items()
        if name != "event"
    )
    print(f"{event['event']:<10} {words}", flush=True)
