"""What a person sees of a fault of the program: its cause in a sentence, the rest in a file."""

import os
import re
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

from swarm.errors import SwarmError, leaf_errors
from swarm.terminal.exit import is_expected

PATTERN = "crash-*.txt"
FILES_KEPT = 5
_PYTHON = (sysconfig.get_path("stdlib") + os.sep, "<")
"""Beginnings of the names of Python's own files, which say nothing about a fault."""
PACKAGES = frozenset({"swarm", "peers", "simnet"})
_KINDS = ("roles", "commands", "environments", "engines", "objectives")
GROUPS = tuple(f"swarm.{each}" for each in _KINDS)
"""Groups of entry points by which other packages add to Swarm."""


class Crash(SwarmError):
    """An error that nobody foresaw. The message says where it came from and where to read more."""


@contextmanager
def crashes_reported(home: Path) -> Iterator[None]:
    """Raise `Crash` for an error that is neither a person's, another peer's nor the machine's.

    The traceback goes to a file in `home`: with nested groups it has hundreds of lines, of which
    one says what happened."""
    try:
        yield
    except Exception as error:
        if is_expected(error):
            raise
        package = foreign_package(error)
        whose = f"the package {package}" if package else "the program"
        asked = "tell its makers" if package else "please report it"
        raise Crash(
            f"a fault of {whose}: {_cause(error)}; {_kept(error, home)}, {asked}; "
            "the peer may be started again"
        ) from error


def foreign_package(error: BaseException) -> str:
    """The package that adds something to Swarm, and whose code the first unexpected error came
    from or through; empty for none but our own."""
    cause = next((each for each in leaf_errors(error) if not is_expected(each)), None)
    if cause is None:
        return ""
    packages = {
        re.split("[.:]", entry.value)[0]: entry.dist.name
        for group in GROUPS
        for entry in entry_points(group=group)
        if entry.dist is not None
    }
    frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
    tops = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    return next((packages[top] for top in tops if top in packages and top not in PACKAGES), "")


def _cause(error: BaseException) -> str:
    """The first unexpected error inside, and the line of ours that it came from.

    Where it was raised in another package (a role of somebody's, say), that line, too."""
    cause = next(each for each in leaf_errors(error) if not is_expected(each))
    frames = traceback.extract_tb(cause.__traceback__)
    ours = [frame for frame in frames if PACKAGES.intersection(Path(frame.filename).parts)]
    frame = next(reversed(ours or list(frames)), None)
    what = f"{type(cause).__name__}: {cause}".rstrip(": ")[:300]
    if frame is None:
        return what
    parts = Path(frame.filename).parts
    first = max((at for at, part in enumerate(parts) if part in PACKAGES), default=-1)
    where = f"{'/'.join(parts[first:])}, line {frame.lineno}, in {frame.name}"
    last = frames[-1]
    if last is not frame and not last.filename.startswith(_PYTHON):
        where += f"; raised in {Path(last.filename).name}, line {last.lineno}, in {last.name}"
    return f"{what} ({where})"


def _kept(error: BaseException, home: Path) -> str:
    """Write the traceback to a file; a clause that says where it is."""
    path = home / f"crash-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    try:
        home.mkdir(parents=True, exist_ok=True)
        # Nurseries within nurseries: the cause lies deeper than what is formatted by default.
        whole = traceback.TracebackException.from_exception(error, max_group_depth=100)
        path.write_text("".join(whole.format()), errors="backslashreplace")
        for old in sorted(home.glob(PATTERN))[:-FILES_KEPT]:
            old.unlink()
    except OSError as problem:
        return f"the traceback could not be written to {path} ({problem.strerror})"
    return f"the whole traceback is in {path}"
