"""Submissions that no validator has yet, in the order of their numbers; whether one may begin."""

from dataclasses import dataclass, field
from typing import Self

import trio

from peers.inference.idle import Cause
from peers.inference.outbox import path_of
from swarm.jobs import SubmissionOrder
from swarm.wire.envelope import Envelope
from swarm.wire.messages import StepOrder

ASKED_AT_ONCE = 2
"""Submissions that the child is asked for at once: it generates the second while it builds the
proofs of the first, or before, where they share the batch."""

UNDELIVERED_MAX = 4
"""Submissions that no validator has yet, so that a peer stops whose deliveries stall, or whose
environment peers do: while all episodes of those that the child has wait for turns, one more may
begin."""


@dataclass(eq=False, kw_only=True)
class PendingSubmission:
    """A submission that no validator has yet."""

    order: StepOrder
    envelope: Envelope | None
    asked: SubmissionOrder
    entry: bytes
    since: float
    before: Self | None = None
    """The submission that was begun before; it is kept first."""
    generated: bool = False
    kept: trio.Event = field(default_factory=trio.Event)
    delivered: trio.Event = field(default_factory=trio.Event)

    @property
    def number(self) -> int:
        return self.asked.number

    @property
    def path(self) -> str:
        return path_of(self.order.lineage, self.order.step, self.number)


class PendingSubmissions:
    """Pending submissions of one peer, and the next number of the step that it works on."""

    def __init__(self) -> None:
        self.begun: list[PendingSubmission] = []
        """In the order in which they were begun."""
        self.number = 0
        self._step: tuple[int, int] = (-1, -1)
        self._expected = 0
        """Submissions that this peer expects to make for the open step: as many as for the last."""
        self._wanted = 0
        """Submissions of the open step that were wanted when those before were delivered."""
        self._stalled = False
        """Whether all episodes of those that are being generated wait for environment peers."""

    def forget(self) -> None:
        """Drop all: the child that generated them is gone."""
        self.begun, self._step = [], (-1, -1)

    def works_on(self, order: StepOrder) -> bool:
        """Whether `start_step` was last called for this order's step."""
        return self._step == (order.lineage, order.step)

    def start_step(self, order: StepOrder, number: int) -> None:
        self._step, self.number = (order.lineage, order.step), number
        self._expected, self._wanted = self._wanted, 0

    def begin(self, pending: PendingSubmission) -> None:
        """Add the submission with the next number."""
        pending.before = self.begun[-1] if self.begun else None
        self.begun.append(pending)
        self.number += 1
        self._stalled = False

    def stall(self, submissions: int) -> bool:
        """Note of how many submissions all episodes wait; returns whether one more may begin."""
        before, self._stalled = self._stalled, 0 < len(self.generating) <= submissions
        return self._stalled > before

    def end(self, pending: PendingSubmission, newest: StepOrder | None) -> None:
        """Note that a validator has a submission. `newest`: the step order that came last."""
        self.begun.remove(pending)
        pending.delivered.set()
        if newest is not None and newest.groups_wanted > 0 and self.works_on(pending.order):
            self._wanted = pending.number + 2  # this one and the next

    @property
    def generating(self) -> list[PendingSubmission]:
        return [each for each in self.begun if not each.generated]

    def obstacle(self, order: StepOrder, room: int) -> Cause | None:
        """Why no submission may begin; `room`: those that may be handed over before verdicts."""
        number = self.number if self.works_on(order) else 0
        unkept = sum(not each.kept.is_set() for each in self.begun)
        if order.groups_wanted == 0:
            return "waiting_for_order"
        if number >= order.submissions_max:
            return "out_of_work"
        if len(self.generating) >= ASKED_AT_ONCE and not self._stalled:
            return "building_proofs"
        of_step = any(self.works_on(each.order) for each in self.begun)
        if of_step and number >= self._expected:  # others may make it before: wait and see
            return "building_proofs" if unkept else "waiting_for_delivery"
        if len(self.begun) >= UNDELIVERED_MAX:
            return "building_proofs" if unkept else "waiting_for_delivery"
        if room <= unkept:
            return "building_proofs" if unkept else "waiting_for_verdicts"
        return None
