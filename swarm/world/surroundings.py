"""What a process of Swarm lets others on the machine have of it: its children, and its neighbours.

A child holds what strangers wrote: weights, templates, rows, files. Whoever takes it over should
find neither secrets in its variables nor the keys in its owner's memory.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping

HOME_VARIABLE = "SWARM_HOME"
"""Environment variable with the home of a peer; a peer sets it for itself."""

INSTALLED_VARIABLE = "SWARM_INSTALLED"
"""Environment variable of children: the folder of the home with the installed environments."""

FORK_SERVER_VARIABLE = "SWARM_FORK_SERVER"
"""Environment variable with the socket of a fork server (`swarm.world.fork_server`)."""

KEPT_VARIABLE = "SWARM_CHILD_VARIABLES"
"""Environment variable with names of variables, separated by commas, that children get although
they look like secrets: a judge's key, for example."""

_SECRET = re.compile(
    r"(^|_)(TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|(API)?KEYS?|CREDENTIALS?|AUTH_SOCK)(_|$)",
    re.IGNORECASE,
)
"""Names of variables that hold secrets: one of the words between underscores."""

_PR_SET_DUMPABLE = 4


def childs_environment(own: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The variables that a child gets of its owner's: all but the home and secrets."""
    named = own.get(KEPT_VARIABLE.encode(), b"").decode("utf-8", "replace")
    kept = {name.strip() for name in named.split(",")}
    given = {name: value for name, value in own.items() if not _is_secret(name, kept)}
    home = given.pop(HOME_VARIABLE.encode(), None)
    if home is not None:
        given[INSTALLED_VARIABLE.encode()] = home + b"/environments"
    return given


def _is_secret(name: bytes, kept: set[str]) -> bool:
    text = name.decode("utf-8", "replace")
    return text not in kept and _SECRET.search(text) is not None


def close_memory() -> None:
    """Forbid other processes of the same user to read or trace this one, which holds a key.

    They find its files in /proc closed, too, and the kernel writes no core of it. A process that
    may trace any other, such as root's, still can.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
