"""The environments of this machine, which a child process loads."""

from __future__ import annotations

from swarm.errors import UserError
from swarm.jobs.environments import CatalogueService, Installed, ListInstalled
from swarm.world import client
from swarm.world.compute import LocalCompute

SERVICE = "peers.environments.trial:Catalogue"


async def installed() -> list[Installed]:
    """All environments of this machine, by name."""
    async with LocalCompute().child(SERVICE, name="environments") as child:
        return (await client(CatalogueService, child).list(ListInstalled())).environments


async def version_of(name: str) -> str:
    """The version of an environment of this machine; raises `UserError`."""
    found = {each.name: each for each in await installed()}
    if name not in found:
        raise UserError(
            f"environment {name!r} is not installed here; known environments: {', '.join(found)}"
        )
    if found[name].problem:
        raise UserError(found[name].problem)
    return found[name].version
