"""The roles of peers, with engines, environments and learning.

The names below are the library's face (docs/library.md), loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers.environments.interface import Message
    from peers.library import (
        Completion,
        Policy,
        draw_task,
        grade,
        load_environment,
        load_model,
        load_policy,
        loss,
    )
    from swarm.wire.manifest import Objective

_HOMES = {"Message": "peers.environments.interface", "Objective": "swarm.wire.manifest"}
"""The modules of the names that are not in `peers.library`."""

__all__ = [
    "Completion",
    "Message",
    "Objective",
    "Policy",
    "draw_task",
    "grade",
    "load_environment",
    "load_model",
    "load_policy",
    "loss",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'peers' has no attribute {name!r}")
    home = _HOMES.get(name, "peers.library")
    if home == "peers.library":
        from swarm.terminal.extras import require_extra

        require_extra("infer", f"peers.{name}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
