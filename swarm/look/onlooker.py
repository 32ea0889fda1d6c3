"""A run seen from outside: its status.

An onlooker asks all trusted peers at once, over the ledger protocol. It needs no admission. It
checks the answers as if they had come by gossip."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from swarm.errors import PeerError
from swarm.ledger.client import LedgerClient, open_ledger
from swarm.ledger.wire import Status, explained
from swarm.node.node import Node
from swarm.run.run import Run
from swarm.sentences import numbered
from swarm.wire.envelope import Envelope, readable
from swarm.wire.identity import PeerId
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Checkpoint, Evaluation, Eviction, Present, Reinstatement, StepOrder

StateT = TypeVar("StateT", Checkpoint, StepOrder, Evaluation)

STATUS_SECONDS_MAX = 12.0
"""Deadline for finding, reaching and asking one trusted peer."""

STATUS_PATIENCE_SECONDS = 0.5
"""Wait for further answers after the first. Short: trusted peers know nearly the same facts."""


@dataclass
class RunStatus:
    """A run's progress and its peers, as its trusted peers report them."""

    run: Run
    checkpoint: Checkpoint | None = None
    order: StepOrder | None = None
    evaluation: Evaluation | None = None
    """Newest result on held-out tasks."""
    evaluator: str = ""
    """Peer id of its signer."""
    present: dict[str, Present] = field(default_factory=dict)
    """Latest report on each peer, by peer id."""
    forks: dict[str, str] = field(default_factory=dict)
    """How each trusted peer's log contradicts itself, by peer id."""

    def learn(self, status: Status) -> None:
        """Merge one trusted peer's answer; skip envelopes whose signer may not send them."""
        for envelope in readable((*status.envelopes, status.evaluation)):
            self._take(envelope)
        for entry in status.present:
            held = self.present.get(entry.peer)
            if held is None or entry.age_seconds < held.age_seconds:
                self.present[entry.peer] = entry
        for evidence in status.forks:
            try:
                first, second = evidence.opened()
            except ValueError:
                continue
            if first.body.run == self.run.id and first.sender in self.run.manifest.trusted_ids():
                self.forks[first.sender] = explained(first, second)

    def newest(self) -> tuple[int, int]:
        """Return (lineage, step) of the newest checkpoint."""
        newest = self.checkpoint
        return (0, 0) if newest is None else (newest.reference.lineage, newest.reference.step)

    @property
    def state(self) -> str:
        """What the run waits for, in a few words."""
        order = self.order
        if order is None:
            return "not begun"
        if order.final:
            return "over"
        wants = numbered(f"wants {order.groups_wanted} groups")
        return wants if order.groups_wanted else "step closed"

    def _take(self, envelope: Envelope) -> None:
        message = envelope.message
        if not self.run.may_be_shown(envelope):
            return
        if isinstance(message, RunManifest):
            self.run.update(envelope)
        elif isinstance(message, Checkpoint):
            self.checkpoint = _newest(self.checkpoint, message)
        elif isinstance(message, StepOrder):
            self.order = _newest(self.order, message)
        elif isinstance(message, Evaluation):
            self.evaluation = _newest(self.evaluation, message)
            if self.evaluation is message:
                self.evaluator = envelope.sender


def _newest(held: StateT | None, other: StateT) -> StateT:
    return other if held is None or held.order() < other.order() else held


async def status_of(node: Node, run: Run) -> RunStatus:
    """Ask a run's trusted peers for its status; raises `PeerError` when none answers in time."""
    status = RunStatus(run)
    problems: list[str] = []
    with trio.move_on_after(STATUS_SECONDS_MAX) as patience:

        async def ask(client: LedgerClient) -> None:
            status.learn(await client.status())
            patience.deadline = min(
                patience.deadline, trio.current_time() + STATUS_PATIENCE_SECONDS
            )

        await ask_all(node, run.manifest.trusted_ids(), ask, problems)
    if not status.present:
        reasons = f" ({'; '.join(problems)})" if problems else ""
        raise PeerError(
            f"no trusted peer of {run.id} answered within {STATUS_SECONDS_MAX:g} s; "
            f"its trainer and validators may be down{reasons}"
        )
    return status


async def learn_expulsions(node: Node, run: Run, peer: str, problems: list[str]) -> None:
    """Apply a peer's evictions and reinstatements, from all trusted peers, to `run`."""

    async def ask(client: LedgerClient) -> None:
        for raw in (await client.expulsions(peer)).envelopes:
            envelope = client.opened(raw, "eviction")
            told = isinstance(envelope.message, (Eviction, Reinstatement))
            if told and run.may_be_shown(envelope):
                run.expel(envelope)

    await ask_all(node, run.manifest.trusted_ids(), ask, problems)


async def ask_all(
    node: Node,
    peers: list[str],
    ask: Callable[[LedgerClient], Awaitable[None]],
    problems: list[str],
) -> None:
    """Ask several trusted peers at once, without this one.

    Adds a sentence to `problems` for each that does not answer, or that `ask` refuses."""

    async def reach_and_ask(peer: PeerId) -> None:
        try:
            await node.reach(peer)
            async with open_ledger(node.transport, peer) as client:
                await ask(client)
        except PeerError as error:
            problems.append(str(error))

    async with trio.open_nursery() as nursery:
        for peer in peers:
            if peer != node.peer_id:
                nursery.start_soon(reach_and_ask, PeerId(peer))
