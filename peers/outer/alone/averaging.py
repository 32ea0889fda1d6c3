"""The libraries that average for `swarm train --backend`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
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
class Network:
    """How the trainers of a training reach each other; as `AveragingSetup`."""

    run: str
    join: Sequence[str]
    host: str
    port: int
    trainers: int
    wait_seconds: float


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


def open_backend(name: str, network: Network, home: Path) -> Library:
    """The backend of a name; raises `UserError` if it is not installed, or an option is wrong."""
    interpreter = interpreter_for(name, home)
    if not network.run.replace("-", "").replace("_", "").isalnum() or (
        len(network.run) > RUN_CHARACTERS_MAX
    ):
        raise UserError(
            f"--run is {network.run!r}; use at most {RUN_CHARACTERS_MAX} letters, digits, - and _"
        )
    for each in network.join:
        if not each.startswith("/"):
            raise UserError(
                f"--join {each} is no address for {name}; give one like "
                "/ip4/10.0.0.1/tcp/31337/p2p/12D3KooW…, which another trainer prints"
            )
    setup = AveragingSetup(
        run=network.run,
        elements=1,
        state_bytes=1,
        join=tuple(network.join),
        host=network.host,
        port=network.port,
        trainers=network.trainers,
        wait_seconds=network.wait_seconds,
    )
    return Library(name, interpreter, setup)
