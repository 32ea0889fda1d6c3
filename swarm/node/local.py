"""Nodes on the real network: a peer's own, and one that only visits."""

import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from swarm.errors import UserError
from swarm.events import Events, JsonLines, Lines
from swarm.kademlia.records import Validator
from swarm.node import joining
from swarm.node.assemble import assemble
from swarm.node.node import Node
from swarm.run.manifest import load_manifest, run_id
from swarm.run.run import Run
from swarm.settings import BOOTSTRAP, PeerSettings, RelaySettings
from swarm.transport.libp2p import open_libp2p, parse_multiaddr, require_peer
from swarm.transport.libp2p.addresses import Announced, announced, default_listen
from swarm.transport.libp2p.circuits import CircuitLimits
from swarm.wire.identity import KEY_FILE, home_identity
from swarm.world.compute import LocalCompute
from swarm.world.disk import LocalDisk
from swarm.world.home import make_home, open_format, sole_user
from swarm.world.machine import Machine

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)

SILENT_SECONDS_MAX = 2.0
"""Time after which a visit says that it still waits for its bootstrap peers."""


@asynccontextmanager
async def open_node(
    settings: PeerSettings,
    events_sink: Any = None,
    namespaces: Mapping[str, Validator] | None = None,
) -> AsyncIterator[Node]:
    """Open a node on the real network. Raises `UserError` before anything starts."""
    for address in settings.bootstrap:
        require_peer(address)
    for address in settings.listen:
        parse_multiaddr(address)
    _announced(settings, "")
    home = settings.home_path
    with ExitStack() as stack:
        try:
            make_home(home)
            stack.enter_context(sole_user(home, ", ".join(settings.role)))
            open_format(home)
        except OSError as error:
            raise UserError(
                f"--home {home} cannot be used ({error.strerror}); choose another folder"
            ) from error
        async with _node_at(home, settings, events_sink, namespaces) as node:
            yield node


@asynccontextmanager
async def _node_at(
    home: Path, settings: PeerSettings, events_sink: Any, namespaces: Mapping[str, Validator] | None
) -> AsyncIterator[Node]:
    is_new = not (home / KEY_FILE).exists()
    identity = home_identity(home)
    world = Machine()
    events = Events(world, identity.peer_id)
    events.add_sink(
        events_sink or (JsonLines() if settings.json_logs else Lines(verbose=settings.verbose))
    )
    if is_new:
        events.emit("peer.identity_made", key=str(home / KEY_FILE))
    disk = LocalDisk(home, settings.quota_bytes)
    relay = settings.of("relay", RelaySettings)
    manifests = {run_id(m): m for m in (load_manifest(Path(f)) for f in settings.manifest)}
    async with (
        open_libp2p(
            identity,
            listen=settings.listen or default_listen(),
            announced=_announced(settings, identity.peer_id),
            circuit_limits=CircuitLimits(
                reservations=relay.reservations,
                bytes_per_second=relay.carry_mbps and relay.carry_mbps * 1e6 / 8,
            ),
            bulk_port=settings.bulk_port,
            uplink_bytes_per_second=settings.uplink_mbps and settings.uplink_mbps * 1e6 / 8,
            world=world,
            disk=disk,
            events=events,
            relay="relay" in settings.role or BOOTSTRAP in settings.role,
        ) as transport,
        assemble(
            identity,
            world=world,
            disk=disk,
            compute=LocalCompute(events=events),
            transport=transport,
            events=events,
            settings=settings,
            manifests=manifests,
            namespaces=namespaces,
        ) as node,
    ):
        yield node


def _announced(settings: PeerSettings, peer: str) -> Announced:
    return announced(
        settings.announce, settings.announce_bulk, detected=settings.announce_detected, peer=peer
    )


@asynccontextmanager
async def visit(
    bootstrap: Sequence[str] | None,
    run: str | None,
    *,
    home: Path | None = None,
    looks_on: bool = False,
    listen: Sequence[str] = LOOPBACK,
) -> AsyncIterator[tuple[Node, Run]]:
    """Open a node that has found a run, without joining it. See `visit_network`, `find_run`."""
    async with visit_network(bootstrap, run, home=home, listen=listen) as (node, entry_points):
        yield node, await joining.find_run(node, entry_points, looks_on=looks_on)


@asynccontextmanager
async def visit_network(
    bootstrap: Sequence[str] | None,
    run: str | None = None,
    *,
    home: Path | None = None,
    listen: Sequence[str] = LOOPBACK,
) -> AsyncIterator[tuple[Node, joining.EntryPoints]]:
    """Open a node that is connected to bootstrap peers, those last used by default.

    `run` is for `find_run`. The node's key and state are in `home`, by default a temporary folder.
    `listen`: where it listens; by default, nobody else can reach it."""
    with tempfile.TemporaryDirectory(prefix="swarm-observer-") as momentary:
        settings = PeerSettings(
            role=["observer"],
            bootstrap=list(bootstrap or last_bootstrap()),
            listen=list(listen),
            home=str(home or momentary),
            run=run,
        )
        async with open_node(settings, events_sink=lambda event: None) as node:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_say_that_it_waits, settings.bootstrap)
                entry_points = await joining.join_network(node)
                nursery.cancel_scope.cancel()
            yield node, entry_points


async def _say_that_it_waits(bootstrap: Sequence[str]) -> None:
    await trio.sleep(SILENT_SECONDS_MAX)
    print(
        f"no answer yet from {', '.join(bootstrap)}; asking for up to "
        f"{joining.BOOTSTRAP_DEADLINE_SECONDS:g} s",
        file=sys.stderr,
        flush=True,
    )


def last_bootstrap(home: Path | None = None) -> list[str]:
    """The bootstrap addresses that this home's peer last joined through; raises `UserError`."""
    path = (home.expanduser() if home else PeerSettings().home_path) / joining.LAST_BOOTSTRAP
    try:
        found = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        found = []
    if not found:
        raise UserError(
            "which network? give --bootstrap MULTIADDR, in Python visit(MULTIADDR) (no peer has "
            f"joined one from {path.parent} yet)"
        )
    return found
