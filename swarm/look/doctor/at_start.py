"""The checks that every peer makes of itself when it starts, as events `peer.check`.

The quick ones come before the peer joins. What keeps a peer from working ends it there with its
sentence: a home or key that cannot be used, a taken port, missing packages, an engine that is not
installed. The others follow once the peer is at work, so that no start waits for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import trio

from swarm.errors import PeerError
from swarm.events import Event
from swarm.look.doctor.machine import clock, disk_speed
from swarm.look.onlooker import status_of
from swarm.node.node import Node
from swarm.roles import load_role, machine_findings
from swarm.run.findings import Finding
from swarm.run.run import Run
from swarm.settings import BOOTSTRAP, PeerSettings
from swarm.terminal.extras import EXTRA_OF_ROLE, require_extra

LATER_SECONDS = 20.0
"""Delay of the slower checks: meanwhile the peer joins, and fetches its first policy."""

WRITTEN_BYTES = 4 << 20
"""Bytes written to measure the disk; `swarm doctor` writes more."""


def check_before_start(settings: PeerSettings) -> None:
    """Raise `UserError` for what would end the peer later: packages, and what its roles check."""
    for role in settings.role:
        if role in EXTRA_OF_ROLE:
            require_extra(EXTRA_OF_ROLE[role], f"--role {role}")
        if role != BOOTSTRAP and (check := getattr(load_role(role), "check", None)):
            check(settings)


@asynccontextmanager
async def checking(node: Node) -> AsyncIterator[None]:
    """Check the peer inside the block, in the background."""
    at_work = trio.Event()

    def hear(event: Event) -> None:
        if event.name == "peer.status":
            at_work.set()

    if set(node.settings.role) == {BOOTSTRAP}:
        at_work.set()  # it joins no run
    node.events.add_sink(hear)
    _say(node, [clock()])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_check_later, node, at_work)
        yield
        nursery.cancel_scope.cancel()


async def _check_later(node: Node, at_work: trio.Event) -> None:
    await at_work.wait()
    await trio.sleep(LATER_SECONDS)
    home = node.settings.home_path
    _say(node, [await trio.to_thread.run_sync(disk_speed, home, WRITTEN_BYTES)])
    roles = [load_role(name) for name in node.settings.role if name != BOOTSTRAP]
    _say(node, await trio.to_thread.run_sync(machine_findings, roles))
    if node.part is None:
        return
    from swarm.look.doctor.network import Place, network_findings

    run = Run(node.part.run.manifest_envelope)  # apart from the peer's own, which events change
    try:
        await status_of(node, run)
    except PeerError as error:
        _say(node, [Finding("trusted", str(error), {}, advice=True)])
        return
    _say(node, await network_findings(Place(node, node.settings, node.peer_id, run)))


def _say(node: Node, found: Iterable[Finding]) -> None:
    for each in found:
        node.events.emit(
            "peer.check",
            topic=each.topic,
            state=each.state,
            text=each.text,
            figures=each.figures,
        )
