"""The runs of a network, as its bootstrap peers list them and their trusted peers report them."""

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from swarm.errors import PeerError
from swarm.look.onlooker import RunStatus, status_of
from swarm.node.joining import EntryPoints, join_dht
from swarm.node.local import visit_network
from swarm.node.node import Node
from swarm.run.manifest import run_id
from swarm.run.manifest_exchange import ask_for_manifests
from swarm.run.run import Run
from swarm.wire.envelope import Envelope
from swarm.wire.identity import PeerId

LIST_SECONDS = 10.0
"""Deadline for the lists of all bootstrap peers that answered."""

STATUS_SECONDS = 20.0
"""Deadline for the status of all runs: a network may have hundreds, and some of them dead."""

ASKED_AT_ONCE = 8
"""Runs whose trusted peers are asked at the same time."""


@dataclass
class Listed:
    run: Run
    status: RunStatus | None = None
    """None if no trusted peer of the run answered in time."""


async def runs_of(bootstrap: Sequence[str] | None) -> list[Listed]:
    """List the runs of a network with their status, by name; raises `PeerError`, `UserError`."""
    async with visit_network(bootstrap) as (node, entry_points):
        listed = [Listed(Run(each)) for each in await _manifests(node, entry_points)]
        node.dht.serving = False
        await join_dht(node, entry_points)
        turns = trio.CapacityLimiter(ASKED_AT_ONCE)

        async def ask(each: Listed) -> None:
            async with turns:
                try:
                    each.status = await status_of(node, each.run)
                except PeerError:
                    return  # it is down, or it has not begun

        with trio.move_on_after(STATUS_SECONDS):
            async with trio.open_nursery() as nursery:
                for each in listed:
                    nursery.start_soon(ask, each)
        return sorted(listed, key=lambda each: each.run.id.rpartition("/")[::-1])


async def _manifests(node: Node, entry_points: EntryPoints) -> list[Envelope]:
    newest: dict[str, Envelope] = {}
    answered = False
    problems: list[str] = []

    async def ask(peer: PeerId) -> None:
        nonlocal answered
        try:
            for envelope in await ask_for_manifests(node.transport, peer):
                held = newest.get(run_id(envelope))
                if held is None or held.message.order() < envelope.message.order():
                    newest[run_id(envelope)] = envelope
            answered = True
        except PeerError as error:
            problems.append(str(error))

    with trio.move_on_after(LIST_SECONDS):
        async with trio.open_nursery() as nursery:
            for peer in entry_points:
                nursery.start_soon(ask, peer)
    if not answered and not newest:
        reasons = "; ".join(problems) or f"no answer within {LIST_SECONDS:g} s"
        raise PeerError(f"no bootstrap peer listed its runs: {reasons}")
    return list(newest.values())
