"""The endpoint's process: an engine, and an HTTP server before it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import trio
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework

from peers.endpoint.app import Endpoint, Limits
from peers.endpoint.connections import serve_connections
from peers.endpoint.driving import Driver, OwnEngine
from peers.endpoint.errors import ApiError
from peers.endpoint.gate import Keys, is_loopback
from peers.endpoint.generating import Generator
from peers.endpoint.policy import Policy, calls_of, chat_of, stop_ids_of
from peers.endpoint.recording import Sessions, check_folder
from peers.engines.registry import make_engine
from peers.environments.renderer import Renderer
from swarm.errors import UserError
from swarm.jobs import Hardware

SWEEP_SECONDS = 10.0
"""Time between two looks for sessions that are idle for too long."""

HEADERS_BYTES_MAX = 16 << 10
IDLE_CONNECTION_SECONDS = 20
STALLED_MS = 120_000
"""A connection whose client takes nothing of what was sent for so long is broken off."""

KEY_CHARACTERS_MIN = 16


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
    limits: Limits = field(default_factory=Limits)


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
    return endpoint_of(
        Driver(OwnEngine(engine)),
        renderer,
        folder=options.folder,
        name=options.name,
        stop_ids=stop_ids,
        record=options.record,
        limits=options.limits,
        keys=keys,
    )


def endpoint_of(
    driver: Driver,
    renderer: Renderer,
    *,
    folder: Path,
    name: str,
    stop_ids: tuple[int, ...],
    record: Path | None,
    limits: Limits,
    keys: Keys,
) -> Endpoint:
    """The endpoint of the policy in `folder`, which `driver` generates with; raises `UserError`."""
    chat = chat_of(folder, renderer)
    policy = Policy(
        name=name,
        renderer=renderer,
        chat=chat,
        calls=calls_of(chat),
        stop_ids=stop_ids,
        length_max=driver.capabilities.length_max,
        engine_class=driver.capabilities.engine_class,
    )
    sessions = Sessions(policy, record)
    return Endpoint(
        policy, Generator(policy, driver, sessions, limits.tokens_max), sessions, limits, keys
    )


async def run_endpoint(
    endpoint: Endpoint, listener: socket.socket, started: Callable[[str], None]
) -> None:
    """Serve until cancelled, then write the open sessions; `started` hears the URL."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(endpoint.generator.driver.run)
            nursery.start_soon(_sweep, endpoint)
            await nursery.start(_serve, endpoint, listener)
            started(url)
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
    config = Config()
    config.errorlog = None  # the application prints what failed
    config.include_server_header = False
    config.h11_max_incomplete_size = HEADERS_BYTES_MAX
    config.keep_alive_timeout = IDLE_CONNECTION_SECONDS
    app = cast(ASGIFramework, endpoint.app())
    await serve_connections(app, config, listener, task_status=task_status)


async def _sweep(endpoint: Endpoint) -> None:
    while True:
        await trio.sleep(SWEEP_SECONDS)
        problem = await endpoint.close_resting()
        if problem:
            print(problem, file=sys.stderr)


def _address(listen: str, names: Names) -> tuple[str, int]:
    """Host and port of `host:port`; raises `UserError`."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"{names.listen} {listen!r} is no host:port, such as 127.0.0.1:8000")
    return "127.0.0.1" if host == "localhost" else host.strip("[]"), int(port)


def open_listener(listen: str, names: Names = OPTIONS) -> socket.socket:
    """A listening socket at `host:port`; raises `UserError`."""
    host, port = _address(listen, names)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(AttributeError, OSError):  # Linux has it; accepted sockets inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UserError(
            f"{names.listen} {listen}: nothing can listen there ({error.strerror or error}); "
            "choose another address or port"
        ) from error
    return listener


def read_keys(
    listen: str, key_file: Path | None, reward_key_file: Path | None, names: Names = OPTIONS
) -> Keys:
    """The keys in their files; raises `UserError` where one is needed and missing."""
    if key_file is None and not is_loopback(_address(listen, names)[0]):
        raise UserError(
            f"{names.listen} {listen} is reached from other machines, so a key is needed: write "
            "one into a file (head -c 32 /dev/urandom | base64 > endpoint.key) and name it with "
            f"{names.keys}, or listen at 127.0.0.1"
        )
    agents = _keys_in(key_file, names.keys)
    rewards = _keys_in(reward_key_file, names.reward_keys)
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


def _keys_in(path: Path | None, option: str) -> frozenset[str]:
    """The keys in a file, one a line."""
    if path is None:
        return frozenset()
    try:
        lines = path.expanduser().read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {path} cannot be read ({error})") from error
    keys = frozenset(line.strip() for line in lines if line.strip())
    if not keys or min(map(len, keys)) < KEY_CHARACTERS_MIN:
        raise UserError(
            f"{option} {path} must hold a key of at least {KEY_CHARACTERS_MIN} characters in each "
            "line"
        )
    return keys
