"""Precedence: an acceptance waits while a validator earlier in rank may still refuse it, and a
refusal that binds all overrules it.

A worker delivers to the validator that comes first in rank; a later one judges only what those
before it cannot. An earlier validator that was passed over without being asked recomputes the
submission, and its refusal binds all (`docs/security.md`). So the trainer waits for its verdict, at
most `verdict_seconds`, before it takes what a later one accepted. It does not wait for a validator
that it cannot reach, nor for one that acknowledged the submission and then had its time. One that
stayed silent through several whole waits gets little time until it is heard again: otherwise it
would delay every acceptance that it comes before, for the whole run."""

from collections import Counter
from dataclasses import dataclass

import trio

from peers.trainer.progress import Progress
from peers.trainer.store import TrainerStore
from swarm.errors import PeerError
from swarm.ledger.ruling import binds
from swarm.node.run_node import RunNode
from swarm.node.trusted import TrustedPart
from swarm.run.heard_verdicts import HeardVerdicts, Key, report_contradictions, verdict_in
from swarm.run.work import judges_of
from swarm.wire.envelope import Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Acknowledgement, Verdict
from swarm.world.observable import Observable
from swarm.world.recent import Recent

ACKNOWLEDGED_KEPT = 4096
"""Acknowledgements whose time is remembered; the oldest is forgotten first."""

SILENT_WAITS_MAX = 3
"""Whole waits for a validator, in a row, after which it is given `acknowledgement_seconds` only."""


@dataclass(eq=False)
class Refusals:
    """The refusals that bind all validators, from gossip and from the logs."""

    peer: RunNode
    trusted: TrustedPart
    progress: Progress

    def __post_init__(self) -> None:
        validators = self.peer.run.manifest.validator_ids()
        self.heard = Observable(HeardVerdicts(ranked=validators))

    def hear(self, envelope: Envelope) -> bool:
        """Take note of a verdict; returns whether it binds all validators."""
        verdict = verdict_in(envelope)
        if (verdict.lineage, verdict.step) < (self.progress.lineage, self.progress.oldest_policy()):
            return False
        report_contradictions(self.heard.value.hear(envelope), envelope, self.peer.node.events)
        self.heard.touch()
        return binds(verdict)

    def bind(self, verdict: Verdict) -> bool:
        """Whether an accepted submission was refused by a validator, and the refusal binds all."""
        key = (verdict.worker, verdict.submission)
        return self.heard.value.is_refused(key) or self.trusted.tables.is_refused(*key)

    def forget_before(self, lineage: int, policy: int) -> None:
        """Forget the verdicts on steps that can no longer be trained on."""
        for key in self.heard.value.older(lineage, policy):
            self.heard.value.forget(key)


class Precedence:
    """Holds acceptances back until no earlier validator is expected to refuse them."""

    def __init__(self, peer: RunNode, store: TrainerStore, refusals: Refusals) -> None:
        self._peer = peer
        self._store = store
        self._refusals = refusals
        self._acknowledged: Recent[tuple[str, Key], float] = Recent(ACKNOWLEDGED_KEPT)
        """When each validator's acknowledgement of a submission was heard."""
        self._silent: Counter[str] = Counter()
        """Waits for each validator that ran out since it was last heard."""

    def hear(self, envelope: Envelope) -> None:
        """Take note of an acknowledgement."""
        message = envelope.expect(Acknowledgement)
        self._silent.pop(envelope.sender, None)
        key = (envelope.sender, (message.worker, message.submission))
        self._acknowledged.setdefault(key, self._peer.node.world.now())

    async def wait(self, judge: str, verdict: Verdict) -> None:
        """Wait until no validator before `judge` in rank may still refuse what it accepted."""
        order = self._store.order(verdict.lineage, verdict.step)
        validators = self._peer.run.manifest.validator_ids()
        if order is None or judge not in validators:
            return
        ranks = judges_of(validators, order.nonce, verdict.worker, verdict.number)
        if judge == ranks[0]:
            return
        async with trio.open_nursery() as nursery:
            for validator in ranks[: ranks.index(judge)]:
                nursery.start_soon(self._wait_for, validator, verdict)

    async def _wait_for(self, validator: str, verdict: Verdict) -> None:
        limits = self._peer.run.manifest.limits
        key = (verdict.worker, verdict.submission)
        now = self._peer.node.world.now()
        patience = limits.verdict_seconds
        if self._silent[validator] >= SILENT_WAITS_MAX:
            patience = min(patience, limits.acknowledgement_seconds)
        left = patience - (now - self._acknowledged.get((validator, key), now))
        with trio.move_on_after(max(0.0, left)):
            try:
                with trio.fail_after(limits.acknowledgement_seconds):
                    await self._peer.node.reach(PeerId(validator))
            except (PeerError, trio.TooSlowError):
                return
            await self._refusals.heard.wait_until(
                lambda heard: heard.is_refused(key) or validator in heard.opinions(key)
            )
            self._silent.pop(validator, None)
            return
        self._silent[validator] += 1
