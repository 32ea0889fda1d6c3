"""The libraries that average for `swarm train --backend`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from peers.outer.backends.installed import SERVICES, interpreter_for
from swarm.errors import UserError
from swarm.jobs.averaging import AveragingService, AveragingSetup
from swarm.world import client
from swarm.world.compute import LocalCompute

START_SECONDS = 300.0
"""Time for the child to import torch and to reach the others."""

RUN_CHARACTERS_MAX = 100


@dataclass(frozen=True)
class Library:
    """Implements `peers.outer.alone.backend_interface.Backend` by a child that has the library."""

    name: str
    interpreter: Path
    setup: AveragingSetup
    """Without the sizes, which follow from the model."""

    @asynccontextmanager
    async def connect(self, elements: int, state_bytes: int) -> AsyncIterator[AveragingService]:
        """See `Backend.connect`."""
        async with LocalCompute().child(
            SERVICES[self.name],
            msgspec.structs.replace(self.setup, elements=elements, state_bytes=state_bytes),
            name=self.name,
            interpreter=str(self.interpreter),
            start_deadline_seconds=START_SECONDS,
        ) as child:
            yield client(AveragingService, child)


def open_backend(name: str, setup: AveragingSetup, home: Path) -> Library:
    """The backend of a name; raises `UserError` if it is not installed, or an option is wrong."""
    interpreter = interpreter_for(name, home)
    if not setup.run.replace("-", "").replace("_", "").isalnum() or (
        len(setup.run) > RUN_CHARACTERS_MAX
    ):
        raise UserError(
            f"--run is {setup.run!r}; use at most {RUN_CHARACTERS_MAX} letters, digits, - and _"
        )
    for each in setup.join:
        if not each.startswith("/"):
            raise UserError(
                f"--join {each} is no address for {name}; give one like "
                "/ip4/10.0.0.1/tcp/31337/p2p/12D3KooW…, which another trainer prints"
            )
    return Library(name, interpreter, setup)
