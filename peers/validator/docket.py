"""The docket: step orders, the submission in each slot, and the known verdicts."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from peers.validator.cases import Slot, slot_of
from peers.validator.inbox import Key
from swarm.envelope import Envelope
from swarm.identity import PeerId
from swarm.messages import Acknowledgement, Checkpoint, StepOrder, Verdict
from swarm.observable import Observable

TURNED_DOWN_KEPT = 1024
"""Refused announcements whose answer is remembered; an older one is examined again if repeated."""

ORDERS_KEPT = 64
"""Step orders remembered; a few steps are open at a time."""


def verdict_in(envelope: Envelope) -> Verdict:
    """The verdict that an envelope holds."""
    assert isinstance(envelope.message, Verdict)
    return envelope.message


class Taken(NamedTuple):
    """The submission that fills a slot."""

    digest: bytes
    receipt: Envelope | None
    """The acknowledgement or verdict that says so; None for a case restored after a restart."""


class Docket:
    """Step orders, slots and verdicts of the steps that can still be trained on."""

    def __init__(self, validator: PeerId) -> None:
        self._validator = validator
        self._orders: dict[tuple[int, int], StepOrder] = {}
        """By lineage and step."""
        self._taken: dict[Slot, Taken] = {}
        """Slots whose submission was acknowledged or judged by any validator."""
        self._judged: dict[Key, Envelope] = {}
        """This validator's verdicts."""
        self._accepted_elsewhere: dict[Key, Envelope] = {}
        """Other validators' verdicts that accept a submission. Each counts like a verdict of this
        validator, because the trainer uses the first. (Refusals and quarantines do not count,
        because their reason may not hold here.)"""
        self._turned_down: OrderedDict[Key, Envelope] = OrderedDict()
        """Answers to the last refused announcements; a repeated one gets the same answer."""
        self.changed = Observable(None)
        """Changes with step orders."""

    # --- step orders -------------------------------------------------------------------------

    def take_order(self, order: StepOrder) -> None:
        """Remember a trainer's order; the newest order of a step is valid."""
        key = (order.lineage, order.step)
        held = self._orders.get(key)
        if held is None or held.order() < order.order():
            self._orders[key] = order
            while len(self._orders) > ORDERS_KEPT:
                del self._orders[min(self._orders)]
            self.changed.touch()

    def order_of(self, lineage: int, step: int) -> StepOrder | None:
        return self._orders.get((lineage, step))

    # --- verdicts ----------------------------------------------------------------------------

    def verdict_on(self, key: Key) -> Envelope | None:
        """This validator's verdict on a submission, or else another validator's acceptance."""
        return self._judged.get(key) or self._accepted_elsewhere.get(key)

    def answer_to(self, key: Key) -> Envelope | None:
        """The answer to a repeated announcement; None while the submission has no verdict."""
        return self.verdict_on(key) or self._turned_down.get(key)

    def is_judged_here(self, key: Key) -> bool:
        return key in self._judged

    def judged_here(self) -> list[Key]:
        return list(self._judged)

    def accepted_elsewhere(self, key: Key) -> Envelope | None:
        return self._accepted_elsewhere.get(key)

    def give(self, key: Key, envelope: Envelope) -> None:
        """Remember this validator's verdict."""
        self._judged[key] = envelope
        self._take(envelope)

    def turn_down(self, key: Key, envelope: Envelope) -> None:
        """Remember the refusal of an announcement."""
        self._turned_down[key] = envelope
        if len(self._turned_down) > TURNED_DOWN_KEPT:
            self._turned_down.popitem(last=False)

    def hear(self, envelope: Envelope) -> None:
        """Take note of any validator's verdict or acknowledgement, this one's included."""
        self._take(envelope)
        verdict = envelope.message
        if (
            isinstance(verdict, Verdict)
            and envelope.sender != self._validator
            and verdict.outcome == "accepted"
        ):
            self._accepted_elsewhere[verdict.worker, verdict.submission] = envelope

    # --- slots -------------------------------------------------------------------------------

    def taken(self, slot: Slot) -> Taken | None:
        """The submission that fills a slot; None if none was acknowledged or judged."""
        return self._taken.get(slot)

    def fill(self, slot: Slot, digest: bytes, receipt: Envelope | None = None) -> None:
        """Fill a free slot, or add the receipt of the submission that fills it."""
        held = self._taken.setdefault(slot, Taken(digest, receipt))
        if held.digest == digest and receipt is not None:
            self._taken[slot] = Taken(digest, receipt)

    def _take(self, receipt: Envelope) -> None:
        named = receipt.message
        assert isinstance(named, Acknowledgement | Verdict)
        self.fill(slot_of(named.worker, named), named.submission, receipt)

    # --- forgetting --------------------------------------------------------------------------

    def too_old(self, newest: Checkpoint, oldest_step: int) -> list[Key]:
        """The submissions judged here that can no longer be trained on."""
        return [key for key, given in self._judged.items() if _is_old(given, newest, oldest_step)]

    def forget(self, key: Key) -> None:
        """Forget this validator's verdict."""
        del self._judged[key]

    def forget_older(self, newest: Checkpoint, oldest_step: int) -> None:
        """Forget other validators' verdicts and slots of steps that can no longer be trained on."""
        for key, heard in list(self._accepted_elsewhere.items()):
            if _is_old(heard, newest, oldest_step):
                del self._accepted_elsewhere[key]
        lineage = newest.lineage
        for slot in [s for s in self._taken if s.lineage < lineage or s.step < oldest_step]:
            del self._taken[slot]


def _is_old(envelope: Envelope, newest: Checkpoint, oldest_step: int) -> bool:
    verdict = verdict_in(envelope)
    return verdict.lineage < newest.lineage or verdict.step < oldest_step
