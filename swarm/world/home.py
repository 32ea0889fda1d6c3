"""A peer's home folder: private, ignored by git, and used by one process at a time.

A build opens a home of its own format, and refuses every other before it touches it."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from swarm.errors import UserError
from swarm.version import __version__
from swarm.world.disk import replace_file

FORMAT_FILE = "format"

HOME_FORMAT = 2
"""Format that this build reads and writes. Homes of format 1 have no file `format`."""


def check_format(home: Path) -> None:
    """Raise `UserError` for a home of another format; an empty or missing one has none yet."""
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


LOCK = "process.lock"
"""File in a home that the process using it keeps locked, and that describes this process."""

HOLDER_BYTES_MAX = 200


def make_home(home: Path) -> None:
    """Make a folder for keys and state, mode 0700, ignored by git; a used one is left unchanged."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not any(home.iterdir()):
        (home / ".gitignore").write_text("*\n", encoding="ascii")


@contextmanager
def sole_user(home: Path, roles: str) -> Iterator[None]:
    """Lock a home for this process inside the block; `UserError` names the process that holds it.

    The operating system releases the lock however the process ends, even if it is killed."""
    # Not inherited by children: a child that outlives its peer must not hold the lock.
    descriptor = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, HOLDER_BYTES_MAX).decode("utf-8", "replace").strip()
            raise UserError(
                f"--home {home} is in use by {holder or 'another process'}; stop that one first, "
                "or choose another --home"
            ) from None
        since = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} ({roles}, since {since})\n".encode())
        yield
    finally:
        os.close(descriptor)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
