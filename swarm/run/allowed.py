"""The environments that this machine's user allows any run to build (`docs/decisions/0050`)."""

import os
from collections.abc import Iterable

ALLOWED_VARIABLE = "SWARM_ENVIRONMENTS"
"""Environment variable with the environments that this machine's user allows any run to build with
its own options, separated by commas; a peer adds those of its settings, for its children."""


def allowed_environments() -> set[str]:
    """The environments that the user of this machine allows."""
    return set(filter(None, os.environ.get(ALLOWED_VARIABLE, "").split(",")))


def allowing(names: Iterable[str]) -> dict[str, str]:
    """The variable with which a process allows environments, besides those of this one."""
    return {ALLOWED_VARIABLE: ",".join(sorted({*allowed_environments(), *names}))}


def allow_environments(names: Iterable[str]) -> None:
    """Allow environments in this process and its children: their options are the user's own. Only
    the start of a command or of a peer may call it; all else passes names on."""
    os.environ.update(allowing(names))
