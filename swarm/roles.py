"""Roles: their interface, how they are found, and how a peer runs them.

Anyone can add a role: a class with the attributes of `Role`, named in an entry point of the group
`swarm.roles`."""

import re
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import entry_points
from inspect import iscoroutinefunction
from typing import ClassVar, Protocol

import trio

from swarm.errors import UserError
from swarm.node.joining import ROOM_DEADLINE_SECONDS, find_run, join_dht, join_network
from swarm.node.node import PEER_RECORD_LIFETIME_SECONDS, Node
from swarm.node.run_node import RunNode
from swarm.run.admission import TRUSTED_ROLES
from swarm.run.findings import Finding
from swarm.run.records import run_key
from swarm.settings import BOOTSTRAP, ROLE_GROUP, PeerSettings, RoleSettings
from swarm.wire.messages import ROLE_PATTERN


class Role(Protocol):
    """The work that a peer does for a run. Created once the peer is in the network."""

    topics: ClassVar[tuple[str, ...]]
    """Gossip topics that the role follows."""

    def __init__(self, peer: RunNode) -> None: ...

    async def run(self) -> None:
        """Do the work until cancelled; returning means the role's work is over."""

    # Optional: `Settings: ClassVar[type[RoleSettings]]`, the type of the role's table in the peer's
    # settings. The role reads the table with `peer.node.settings.of`.
    # Optional: `async def leave(self) -> None`. It finishes work that is nearly done, once the peer
    # is asked to leave; then `run` is cancelled.
    # Optional, all static:
    # `check(settings: PeerSettings) -> None` raises the `UserError` of what would end the role
    # later, before the peer joins;
    # `machine() -> list[Finding]` makes quick checks of this machine;
    # `async doctor(settings, work: Work | None, model: str | None) -> list[Finding]`, for `swarm
    # doctor`, starts what the role would start, and looks whether the run takes it. `model`
    # names a policy to load as well.
    # Optional: `rank_module: ClassVar[str]`, the module that ranks above 0 run under `torchrun`.


def load_role(name: str) -> type[Role]:
    """Load the class of a role. For an unknown name, raises a `UserError` that lists the roles."""
    known = {entry.name: entry for entry in entry_points(group=ROLE_GROUP)}
    if name not in known:
        raise UserError(
            f"unknown role {name!r}; there are: {', '.join(sorted([*known, BOOTSTRAP]))}"
        )
    if not re.fullmatch(ROLE_PATTERN, name):
        raise UserError(
            f"role {name!r} has a name that no peer would take in a message; its package must call "
            "it by 1 to 20 of a-z, 0-9 and -, beginning with a letter"
        )
    package = known[name].dist
    whose = package.name if package is not None else "a package"
    try:
        role: type[Role] = known[name].load()
    except Exception as error:  # a package of others may do anything
        raise UserError(
            f"the role {name} of {whose} cannot be loaded: {error}; repair the package"
        ) from error
    if not hasattr(role, "topics") or not iscoroutinefunction(getattr(role, "run", None)):
        raise UserError(
            f"the role {name} of {whose} needs the attribute topics and the method "
            "`async def run(self)`; add them to its class"
        )
    return role


def machine_findings(roles: Sequence[type[Role]]) -> list[Finding]:
    """What the roles check of this machine, each topic once."""
    checks = [getattr(role, "machine", list) for role in roles]
    return list({each.topic: each for check in checks for each in check()}.values())


def check_tables(settings: PeerSettings) -> None:
    """Validate the settings of every role before anything starts; raises `UserError`."""
    for name in {*settings.tables, *settings.role} - {BOOTSTRAP}:
        settings.of(name, getattr(load_role(name), "Settings", RoleSettings))


async def take_part(node: Node, roles: Sequence[type[Role]]) -> None:
    """Join the network and, with roles, a run; work until cancelled or all roles have finished.

    Raises `PeerError` if no peer answers, and `UserError` if no run is found or takes this peer."""
    async with trio.open_nursery() as nursery:
        entry_points = await join_network(node, room_seconds=ROOM_DEADLINE_SECONDS)
        given = list(node.manifests)
        run = None
        if roles:
            run = await find_run(node, entry_points)
        else:
            await join_dht(node, entry_points)
        for known in given:
            nursery.start_soon(_publish_manifest, node, known)
        if run is None:
            nursery.start_soon(node.publish_record)
            await trio.sleep_forever()
        node.events.emit("peer.run_found", run=run.id, owner=run.owner)
        peer = RunNode(node, run, sorted({topic for role in roles for topic in role.topics}))
        strangers = {"replica"} if run.manifest.outer.is_scored else set()
        for role in TRUSTED_ROLES.difference(strangers) & set(node.settings.role):
            peer.trusted_part(role)  # raises its error before the run refuses admission
        nursery.start_soon(node.publish_record, run)  # not earlier: a run may hide its peers
        async with peer.joined(), trio.open_nursery() as work:
            at_work = [role_type(peer) for role_type in roles]
            leaving = [leave for each in at_work if (leave := getattr(each, "leave", None))]
            nursery.start_soon(_leave_when_asked, node, leaving, work.cancel_scope)
            for each in at_work:
                work.start_soon(each.run)
        if not node.departure.asked.is_set():
            order = peer.step_order()
            if order is not None and order.final:
                node.events.emit("peer.work_over", run=run.id)
            else:
                node.events.emit("peer.roles_ended", roles=sorted(node.settings.role))
        nursery.cancel_scope.cancel()


async def _leave_when_asked(
    node: Node, leaving: Sequence[Callable[[], Awaitable[None]]], work: trio.CancelScope
) -> None:
    """Let the roles finish what is nearly done once the peer is asked to leave, and end it."""
    node.departure.listens = True
    await node.departure.asked.wait()
    async with trio.open_nursery() as nursery:
        for leave in leaving:
            nursery.start_soon(leave)
    work.cancel()


async def _publish_manifest(node: Node, run: str) -> None:
    """Republish a known manifest in the DHT until cancelled."""
    while True:
        await node.dht.put(run_key(run), node.manifests[run].raw)
        await trio.sleep(PEER_RECORD_LIFETIME_SECONDS / 2)
