"""The endpoint's process: an engine and an HTTP server."""

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import trio
from hypercorn.typing import ASGIFramework

from peers.endpoint.app import Endpoint, EndpointLimits
from peers.endpoint.errors import ApiError
from peers.endpoint.gate import Keys
from peers.endpoint.generating import Generator
from peers.endpoint.policy import Policy, calls_of, chat_of
from peers.endpoint.recording import Sessions, check_folder
from peers.endpoint.sampling import Driver
from peers.endpoint.structure import Structures
from peers.engines.registry import make_engine
from peers.environments.renderer import Renderer, stop_ids_of
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.transport.http.connections import serve_connections
from swarm.transport.http.local_server import keys_in, required_keys, url_of

SWEEP_SECONDS = 10.0
"""Time between two looks for sessions that are idle for too long."""


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
            f"--model {options.folder} is no folder; name the Hugging Face folder of a policy"
        )
    stop_ids = stop_ids_of(options.folder)
    renderer = Renderer(options.folder)
    chat = chat_of(options.folder, renderer)
    if options.record is not None:
        check_folder(options.record)
    engine = make_engine(options.engine, options.folder, options.hardware, options.number)
    policy = Policy(
        options.name, renderer, chat, calls_of(chat), tuple(stop_ids), engine.capabilities
    )
    sessions = Sessions(policy, options.record)
    structures = Structures(options.folder, policy.stop_ids)
    generator = Generator(policy, Driver(engine), sessions, options.limits.tokens_max, structures)
    return Endpoint(policy, generator, sessions, options.limits, keys)


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
    await serve_connections(cast(ASGIFramework, endpoint.app()), listener, task_status=task_status)


async def _sweep(endpoint: Endpoint) -> None:
    while True:
        await trio.sleep(SWEEP_SECONDS)
        problem = await endpoint.close_resting()
        if problem:
            print(problem, file=sys.stderr)


def read_keys(listen: str, key_file: Path | None, reward_key_file: Path | None) -> Keys:
    """The keys in their files; raises `UserError` where one is needed and missing."""
    agents = required_keys(listen, key_file, "--listen", "--key-file")
    rewards = keys_in(reward_key_file, "--reward-key-file")
    if rewards and not agents:
        raise UserError(
            "--reward-key-file is given without --key-file, so that agents would need no key; "
            "give both"
        )
    if agents & rewards:
        raise UserError(
            "--key-file and --reward-key-file hold the same key; agents could post rewards, "
            "so write different ones"
        )
    return Keys(agents, rewards)
