"""The docket: step orders, the submission in each slot, and the known verdicts."""

from collections.abc import Mapping
from typing import NamedTuple

from peers.validator.cases import Slot, slot_of
from peers.validator.inbox import Key
from swarm.ledger.ruling import settles
from swarm.run.heard_verdicts import HeardVerdicts, verdict_in
from swarm.run.work import OrderBook
from swarm.wire.envelope import Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Acknowledgement, Checkpoint, Verdict
from swarm.world.recent import Recent

TURNED_DOWN_KEPT = 1024
"""Refused announcements whose answer is remembered; an older one is examined again if repeated."""


class Taken(NamedTuple):
    """The submission that fills a slot."""

    digest: bytes
    receipt: Envelope | None
    """The acknowledgement or verdict that says so; None for a case restored after a restart."""


class Docket:
    """Step orders, slots and verdicts of the steps that can still be trained on."""

    def __init__(self, validator: PeerId) -> None:
        self._validator = validator
        self.orders = OrderBook()
        self._taken: dict[Slot, Taken] = {}
        """Slots whose submission was acknowledged or judged by any validator."""
        self._verdicts = HeardVerdicts(ranked=[validator])
        self._turned_down: Recent[Key, Envelope] = Recent(TURNED_DOWN_KEPT)
        """Answers to the last refused announcements; a repeated one gets the same answer."""

    # --- verdicts ----------------------------------------------------------------------------

    def verdict_on(self, key: Key) -> Envelope | None:
        """The final verdict on a submission, if it was judged here or settled elsewhere."""
        verdict = self._verdicts.final(key)
        if verdict is None or self.is_judged_here(key) or settles(verdict_in(verdict)):
            return verdict
        return None  # another validator's reason, which may not hold here

    def answer_to(self, key: Key) -> Envelope | None:
        """The answer to a repeated announcement; None while the submission has no verdict."""
        return self.verdict_on(key) or self._turned_down.get(key)

    def is_judged_here(self, key: Key) -> bool:
        return self._verdicts.by(self._validator, key) is not None

    def judged_here(self) -> list[Key]:
        return self._verdicts.judged_by(self._validator)

    def settled_elsewhere(self, key: Key) -> Envelope | None:
        """Another validator's final acceptance or binding refusal: no verdict is needed here."""
        verdict = self.verdict_on(key)
        return verdict if verdict is not None and verdict.sender != self._validator else None

    def opinions_on(self, key: Key) -> Mapping[str, Verdict]:
        """The known verdicts on a submission, by validator."""
        return self._verdicts.opinions(key)

    def turn_down(self, key: Key, envelope: Envelope) -> None:
        """Remember the refusal of an announcement."""
        self._turned_down[key] = envelope

    def hear(self, envelope: Envelope) -> list[tuple[str, str]]:
        """Note a verdict or acknowledgement; returns contradictions: (refuses, accepts)."""
        self._take(envelope)
        return self._verdicts.hear(envelope) if isinstance(envelope.message, Verdict) else []

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
        return self._verdicts.older(newest.lineage, oldest_step, by=self._validator)

    def verdict_here(self, key: Key) -> Verdict:
        """This validator's verdict on a submission that it judged."""
        return verdict_in(self.signed_here(key))

    def signed_here(self, key: Key) -> Envelope:
        """The same, signed."""
        envelope = self._verdicts.by(self._validator, key)
        assert envelope is not None
        return envelope

    def forget_older(self, newest: Checkpoint, oldest_step: int) -> None:
        """Forget verdicts and slots of steps that can no longer be trained on."""
        for key in self._verdicts.older(newest.lineage, oldest_step):
            self._verdicts.forget(key)
        lineage = newest.lineage
        for slot in [s for s in self._taken if s.lineage < lineage or s.step < oldest_step]:
            del self._taken[slot]
