"""A peer's home on this machine: made private, kept out of git, used by one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from swarm.errors import UserError

LOCK = "lock"
"""File that the process using a home keeps locked, and in which it says who it is."""

HOLDER_BYTES_MAX = 200


def make_home(home: Path) -> None:
    """Make a folder for keys and state with mode 0700, all of which git ignores.

    A folder that holds something already is left as it is.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not any(home.iterdir()):
        (home / ".gitignore").write_text("*\n", encoding="ascii")


@contextmanager
def sole_user(home: Path, roles: str) -> Iterator[None]:
    """Keep a home to this process inside the block; raises `UserError` naming who holds it.

    The operating system lets go of the lock however the process ends, so a killed one leaves none.
    """
    # Not inherited by children: one that outlives its peer must not hold the home.
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
