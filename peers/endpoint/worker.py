"""The endpoint of an inference peer: agents share the engine with the peer's submissions."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from peers.endpoint.app import EndpointLimits
from peers.endpoint.gate import Keys
from peers.endpoint.recording import check_folder
from peers.endpoint.sampling import HOP_SECONDS, Driver
from peers.endpoint.server import Names, endpoint_of, read_keys, run_endpoint
from peers.engines.engine import Capabilities
from peers.engines.episodes import Player
from peers.engines.guests import Guests
from peers.environments.renderer import Renderer
from swarm.jobs.inference import EndpointSetup
from swarm.transport.http.local_server import open_listener

SETTINGS = Names(
    "[inference] endpoint", "endpoint_key_file", "endpoint_reward_key_file", "endpoint_record"
)

InThread = Callable[[Callable[[float], None], float], Awaitable[None]]
"""Call a function in the engine's thread, once no submission drives the engine there."""


@dataclass(frozen=True)
class _SharedEngine:
    """The engine of a player, in the player's thread."""

    player: Player
    capabilities: Capabilities
    in_thread: InThread

    async def advance(self, guests: Guests) -> None:
        """A submission that drives the engine serves the guests meanwhile."""
        await self.in_thread(self.player.serve_guests, HOP_SECONDS)


class WorkerEndpoint:
    """Listens from the start, and serves once a policy is loaded."""

    def __init__(self, setup: EndpointSetup) -> None:
        """Open the port; raises `UserError`."""
        self._setup = setup
        keys = Path(setup.key_file) if setup.key_file else None
        reward_keys = Path(setup.reward_key_file) if setup.reward_key_file else None
        self._keys: Keys = read_keys(setup.listen, keys, reward_keys, SETTINGS)
        self._record = Path(setup.record).expanduser() if setup.record else None
        if self._record is not None:
            check_folder(self._record, SETTINGS.record)
        self._listener: socket.socket = open_listener(setup.listen, SETTINGS.listen)
        self.guests = Guests()
        """The agents' requests."""

    async def run(
        self, folder: Path, player: Player, capabilities: Capabilities, in_thread: InThread
    ) -> None:
        """Serve the policies of `player` until cancelled. `folder`: that of any of them."""
        driver = Driver(_SharedEngine(player, capabilities, in_thread), self.guests)
        limits = EndpointLimits(requests_max=self._setup.requests_max)
        endpoint = endpoint_of(
            driver,
            Renderer(folder),
            folder=folder,
            name=self._setup.name,
            stop_ids=tuple(self._setup.stop_ids),
            record=self._record,
            limits=limits,
            keys=self._keys,
        )
        await run_endpoint(endpoint, self._listener, lambda url: None)
