"""The exceptions that cross rooms, each saying whose fault it is.

Errors of one operation live beside that operation; only what several rooms raise is here.
"""

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises on hostile bytes: text that is no UTF-8 comes as `UnicodeDecodeError`."""


class SwarmError(Exception):
    """Base of every error Swarm raises on purpose."""


class UserError(SwarmError):
    """The person at the keyboard can fix it: one sentence naming the field, the value, the way out.

    The command line prints the sentence and exits with status 2, never with a traceback.
    """


class PeerError(SwarmError):
    """Another peer is unreachable, too slow, or broke the protocol. Names the peer."""


class DeadlineError(PeerError):
    """Somebody did not answer in time. Names whom was waited for, and how long."""


class DiskFullError(UserError):
    """There is not enough free space for what is being written."""


def user_error_in(error: BaseException) -> UserError | None:
    """The person's mistake inside an error or a group of them, if there is one."""
    return next((leaf for leaf in leaf_errors(error) if isinstance(leaf, UserError)), None)


def leaf_errors(error: BaseException) -> list[BaseException]:
    """The single errors inside a group, in order."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaf_errors(inner)]
    return [error]
