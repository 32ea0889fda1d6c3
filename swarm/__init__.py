"""The network every Swarm peer is made of: identity, wire, DHT, gossip, shardcast, ledger.

Nothing in this package imports torch, and nothing imports `peers` (the roles) or `simnet`.

The names below are the library's face (docs/library.md). They are loaded on first use, so
`import swarm` costs nothing. Functions that wait are plain ones, of `swarm.plain`; `swarm.library`
has the same as asynchronous ones, for programs under trio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swarm.version import __version__

if TYPE_CHECKING:
    from swarm.errors import PeerError, SwarmError, UserError
    from swarm.library import Visit, read_rollouts
    from swarm.node.node import Node
    from swarm.plain import fetch, get, ledger_of, open_node, publish, put, status_of, visit

_HOMES = {
    "errors": ("PeerError", "SwarmError", "UserError"),
    "library": ("Visit", "read_rollouts"),
    "node.node": ("Node",),
    "plain": ("fetch", "get", "ledger_of", "open_node", "publish", "put", "status_of", "visit"),
}
"""The modules of the public names."""

__all__ = [
    "Node",
    "PeerError",
    "SwarmError",
    "UserError",
    "Visit",
    "__version__",
    "fetch",
    "get",
    "ledger_of",
    "open_node",
    "publish",
    "put",
    "read_rollouts",
    "status_of",
    "visit",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"swarm.{module}"), name)
    raise AttributeError(f"module 'swarm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
