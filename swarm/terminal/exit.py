"""Exit statuses and error messages of commands, and output that never ends in a traceback."""

import errno
import functools
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import ParamSpec

import typer

from swarm.errors import SwarmError, UserError, leaf_errors, user_error_in
from swarm.sentences import numbered
from swarm.terminal.untrusted import printable_lines

P = ParamSpec("P")

DONE, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130

MEANINGS = {
    DONE: "a command did its work; a peer left when it was asked to, or its run is over",
    FAILED: "other peers, a child process or this machine failed: trying again may help",
    MISTAKE: "a mistake that only a person can correct: the same command fails again",
    INTERRUPTED: "a command other than a peer was interrupted",
}
"""What each exit status tells whatever started the process."""

_NO_HOME = "Could not determine home directory."
"""What Python says of `~` for a user without HOME and without an entry in the list of users."""

HOMELESS = (
    "this user has no home directory that ~ could mean (no HOME, no entry in the list of users); "
    "give --home FOLDER, or set HOME"
)

_MACHINE_ERRORS = {
    *(errno.EACCES, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE),
    *(errno.ENOMEM, errno.ENOSPC, errno.EPERM, errno.EROFS),
}


def exits(work: Callable[P, int | None]) -> Callable[P, None]:
    """Make a command of a function: it exits with the status that the function returns.

    An expected error prints one sentence and exits with a status other than 0."""

    @functools.wraps(work)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            status = work(*args, **kwargs)
        except (SwarmError, OSError, KeyboardInterrupt, BaseExceptionGroup) as error:
            status = exit_with(error)
        except RuntimeError as error:
            if str(error) != _NO_HOME:
                raise
            status = exit_with(UserError(HOMELESS))
        raise typer.Exit(status or DONE)

    return command


def exit_with(error: BaseException) -> int:
    """Print an expected error as one sentence and return the exit status; raise any other."""
    leaves = leaf_errors(error)
    if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    mistake = user_error_in(error)
    if not is_expected(error):
        raise error
    sentence = str(mistake) if mistake else "; ".join(_sentence(leaf) for leaf in leaves)
    print(f"error: {printable_lines(numbered(sentence))}", file=sys.stderr)
    return MISTAKE if mistake else FAILED


def is_expected(error: BaseException) -> bool:
    """Whether an error is a person's, another peer's or the machine's, not the program's."""
    return user_error_in(error) is not None or all(
        isinstance(leaf, (SwarmError, KeyboardInterrupt))
        or (isinstance(leaf, OSError) and leaf.errno in _MACHINE_ERRORS)
        for leaf in leaf_errors(error)
    )


def _sentence(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return str(error)
    where = f" ({error.filename})" if error.filename else ""
    return f"this machine refuses: {error.strerror}{where}"


def speak(command: Callable[[], object]) -> None:
    """Run a command line whose output may go anywhere.

    A character that the locale lacks is printed as `?`. A reader who has seen enough (`| head`)
    ends the output, not the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        command()
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes once more at its end, and complains about the same.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
