"""What a role is, and how one is found: the entry-point group `swarm.roles`.

Anyone can add a role: a class with these attributes, named in an entry point of that group.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import ClassVar, Protocol

from swarm.errors import UserError
from swarm.node import RunNode

GROUP = "swarm.roles"


class Role(Protocol):
    """What a peer does for a run. Made once the peer is in the network."""

    topics: ClassVar[tuple[str, ...]]
    """Gossip topics it follows."""

    def __init__(self, peer: RunNode) -> None: ...

    async def run(self) -> None:
        """Do the work until cancelled; returning means the role's work is over."""
        ...


BOOTSTRAP = "bootstrap"
"""The one role that needs no run: it serves the DHT and hands out manifests (`swarm.peer`)."""


def load_role(name: str) -> type[Role]:
    """The class behind a role's name; raises `UserError` listing the roles there are."""
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in known:
        raise UserError(
            f"unknown role {name!r}; there are: {', '.join(sorted([*known, BOOTSTRAP]))}"
        )
    role: type[Role] = known[name].load()
    return role
