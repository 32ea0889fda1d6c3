"""The endpoint's process: an engine of its own, or an inference peer's, and an HTTP server."""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import trio
from hypercorn.typing import ASGIFramework

from peers.endpoint.app import Endpoint, EndpointLimits
from peers.endpoint.errors import ApiError
from peers.endpoint.gate import Keys
from peers.endpoint.generating import Generator
from peers.endpoint.policy import Policy, chat_of, policy_of
from peers.endpoint.recording import Sessions, check_folder
from peers.endpoint.sampling import HOP_SECONDS, Driver, OwnEngine
from peers.engines.engine import Capabilities
from peers.engines.episodes import Player
from peers.engines.guests import Guests
from peers.engines.registry import make_engine
from peers.environments.renderer import Renderer, stop_ids_of
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.jobs.inference import EndpointSetup
from swarm.transport.http.connections import serve_connections
from swarm.transport.http.local_server import (
    keys_in,
    open_listener,
    required_keys,
    url_of,
)

SWEEP_SECONDS = 10.0
"""Time between two looks for sessions that are idle for too long."""


@dataclass(frozen=True)
class Names:
    """What the settings are called where the user writes them, for errors."""

    listen: str = "--listen"
    keys: str = "--key-file"
    reward_keys: str = "--reward-key-file"
    record: str = "--record"


OPTIONS = Names()
"""The options of `swarm endpoint`."""


@dataclass(frozen=True)
class Options:
    """What `swarm endpoint` was asked for."""

    folder: Path
    name: str
    number: int
    engine: str
    hardware: Hardware = field(default_factory=Hardware)
    record: Path | None = None
    """Folder of the recorded sessions; None: nothing is recorded."""
    limits: EndpointLimits = field(default_factory=EndpointLimits)


def make_endpoint(options: Options, keys: Keys) -> Endpoint:
    """Load the policy; raises `UserError`."""
    if not options.folder.is_dir():
        raise UserError(
            f"--policy {options.folder} is no folder; name the Hugging Face folder of a policy"
        )
    stop_ids = stop_ids_of(options.folder)
    renderer = Renderer(options.folder)
    chat_of(options.folder, renderer)
    if options.record is not None:
        check_folder(options.record)
    engine = make_engine(options.engine, options.folder, options.hardware, options.number)
    policy = policy_of(options.folder, renderer, options.name, stop_ids, engine.capabilities)
    return _endpoint(policy, Driver(OwnEngine(engine)), options.record, options.limits, keys)


def _endpoint(
    policy: Policy, driver: Driver, record: Path | None, limits: EndpointLimits, keys: Keys
) -> Endpoint:
    sessions = Sessions(policy, record)
    generator = Generator(policy, driver, sessions, limits.tokens_max)
    return Endpoint(policy, generator, sessions, limits, keys)


async def run_endpoint(
    endpoint: Endpoint, listener: socket.socket, started: Callable[[str], None]
) -> None:
    """Serve until cancelled, then write the open sessions; `started` hears the URL."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(endpoint.generator.driver.run)
            nursery.start_soon(_sweep, endpoint)
            await nursery.start(_serve, endpoint, listener)
            started(url_of(listener))
    finally:
        for session in endpoint.sessions.all():
            try:
                await endpoint.close(session)
            except ApiError as error:
                print(error.message, file=sys.stderr)


async def _serve(
    endpoint: Endpoint,
    listener: socket.socket,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    app = cast(ASGIFramework, endpoint.app())
    await serve_connections(app, listener, task_status=task_status)


async def _sweep(endpoint: Endpoint) -> None:
    while True:
        await trio.sleep(SWEEP_SECONDS)
        problem = await endpoint.close_resting()
        if problem:
            print(problem, file=sys.stderr)


def read_keys(
    listen: str, key_file: Path | None, reward_key_file: Path | None, names: Names = OPTIONS
) -> Keys:
    """The keys in their files; raises `UserError` where one is needed and missing."""
    agents = required_keys(listen, key_file, names.listen, names.keys)
    rewards = keys_in(reward_key_file, names.reward_keys)
    if rewards and not agents:
        raise UserError(
            f"{names.reward_keys} is given without {names.keys}, so that agents would need no key; "
            "give both"
        )
    if agents & rewards:
        raise UserError(
            f"{names.keys} and {names.reward_keys} hold the same key; agents could post rewards, "
            "so write different ones"
        )
    return Keys(agents, rewards)


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
        policy = policy_of(
            folder, Renderer(folder), self._setup.name, self._setup.stop_ids, capabilities
        )
        driver = Driver(_SharedEngine(player, capabilities, in_thread), self.guests)
        limits = EndpointLimits(requests_max=self._setup.requests_max)
        endpoint = _endpoint(policy, driver, self._record, limits, self._keys)
        await run_endpoint(endpoint, self._listener, lambda url: None)
