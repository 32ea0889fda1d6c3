"""The format of a peer's home: one number for all its files and databases, in the file `format`.

A build opens a home of its own format, and refuses every other before it touches it.
"""

from __future__ import annotations

import json
from pathlib import Path

from swarm.errors import UserError
from swarm.version import __version__
from swarm.world.disk import replace_file

FORMAT_FILE = "format"

HOME_FORMAT = 2
"""Format that this build reads and writes. Homes of format 1 have no file `format`."""


def check_format(home: Path) -> None:
    """Raise `UserError` for a home of another format than this build's.

    An empty or missing home has no format yet.
    """
    path = home / FORMAT_FILE
    try:
        found = json.loads(path.read_bytes())["format"]
    except FileNotFoundError:
        found = 1 if any(home.glob("*.sqlite")) else HOME_FORMAT
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore the home from a copy") from error
    if not isinstance(found, int) or found < 1:
        raise UserError(f"{path} names format {found!r}; restore the home from a copy")
    if found != HOME_FORMAT:
        raise UserError(
            f"--home {home} has format {found}, and this build, {__version__}, reads format "
            f"{HOME_FORMAT}: go on with the Swarm that wrote it, or choose another --home"
        )


def open_format(home: Path) -> None:
    """Check a home's format, and write it into a new home. The caller is the home's sole user."""
    check_format(home)
    if not (home / FORMAT_FILE).exists():
        line = json.dumps({"format": HOME_FORMAT, "build": __version__})
        replace_file(home / FORMAT_FILE, f"{line}\n".encode())
