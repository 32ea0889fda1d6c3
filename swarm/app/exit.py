"""Exit statuses and error messages of commands."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

import typer

from swarm.errors import SwarmError, leaf_errors, user_error_in
from swarm.untrusted import printable_lines

_MACHINE_ERRORS = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.EPERM,
        errno.EROFS,
    }
)


def finish(work: Callable[[], int | None]) -> None:
    """Do a command's work and exit.

    An expected error prints one sentence and exits with a status other than 0.
    """
    try:
        status = work()
    except (SwarmError, OSError, BaseExceptionGroup) as error:
        if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaf_errors(error)):
            print("stopped", file=sys.stderr)
            raise typer.Exit(130) from None
        status = exit_with(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        status = 130
    raise typer.Exit(status or 0)


def exit_with(error: BaseException) -> int:
    """Print an expected error as one sentence and return the exit status; raise any other."""
    mistake = user_error_in(error)
    if mistake is not None:
        print(f"error: {printable_lines(str(mistake))}", file=sys.stderr)
        return 2
    leaves = leaf_errors(error)
    if all(isinstance(leaf, SwarmError) or _is_of_the_machine(leaf) for leaf in leaves):
        told = "; ".join(_told(leaf) for leaf in leaves)
        print(f"error: {printable_lines(told)}", file=sys.stderr)
        return 1
    raise error


def _is_of_the_machine(error: BaseException) -> bool:
    """Whether the error comes from this machine, such as a full disk or a missing permission."""
    return isinstance(error, OSError) and error.errno in _MACHINE_ERRORS


def _told(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return str(error)
    where = f" ({error.filename})" if error.filename else ""
    return f"this machine refuses: {error.strerror}{where}"
