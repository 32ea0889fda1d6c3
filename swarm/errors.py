"""Exceptions that several packages raise; each class says whose fault the error is."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises on hostile bytes: `UnicodeDecodeError` for what is not UTF-8."""


class SwarmError(Exception):
    """Base of every error that Swarm raises on purpose."""


class UserError(SwarmError):
    """An error that the user can fix. Its message is a sentence with field, value and remedy.

    The command line prints the message without a traceback and exits with status 2."""


class PeerError(SwarmError):
    """Another peer is unreachable, too slow, or broke the protocol. The message names the peer."""


class DeadlineError(PeerError):
    """A peer did not answer in time. The message names the peer and the time waited."""


class DiskFullError(UserError):
    """The disk has too little free space for a write."""


class DamagedError(UserError):
    """A file of this machine's own state cannot be read any more."""


@contextmanager
def file_errors(what: object, verb: str = "read") -> Iterator[None]:
    """Turn an `OSError` of the block into the sentence that `what` cannot be read (or written)."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be {verb} ({error.strerror or error})") from error


def user_error_in(error: BaseException) -> UserError | None:
    """Find the first `UserError` in an error or error group, if there is one."""
    return next((leaf for leaf in leaf_errors(error) if isinstance(leaf, UserError)), None)


def leaf_errors(error: BaseException) -> list[BaseException]:
    """List the errors inside nested groups, in order; a plain error is a list of itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaf_errors(inner)]
    return [error]
