"""Verdicts: durable in the log, then published, sent to the worker, and acted on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import trio

from peers.validator.cases import Case, Outcome, verdict_on, without_training
from peers.validator.checks.base import first_failure
from peers.validator.checks.standing import not_evicted
from peers.validator.docket import Docket
from peers.validator.eviction import Records, evict_if_due
from peers.validator.evidence.submission import without_bets
from peers.validator.inbox import Inbox, Key, canonical_path_of, path_of
from peers.validator.queue import CaseQueue
from swarm.errors import PeerError
from swarm.ledger.faults import Fault
from swarm.ledger.ruling import binds, settles
from swarm.node.run_node import RunNode
from swarm.node.trusted import VERDICT_LIFETIME_SECONDS, TrustedPart
from swarm.rollouts.rollouts import mean_parts, parts_in
from swarm.run.heard_verdicts import failed_check, nearest, report_contradictions, verdict_in
from swarm.wire.envelope import Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Evidence, Verdict

VERDICTS_RECOVERED_MAX = 8192
"""Own verdicts read again at a start. Verdicts on open steps are among the newest, and the bound
keeps the start of an old run fast."""


@dataclass(eq=False)
class Verdicts:
    """Gives this validator's verdicts, and serves the accepted files."""

    _peer: RunNode
    _trusted: TrustedPart
    _docket: Docket
    _inbox: Inbox
    _queue: CaseQueue
    _records: Records
    given: Callable[[Case, Verdict], None] = lambda _case, _verdict: None
    """Called after each verdict on a case."""

    def __post_init__(self) -> None:
        self._trusted.faults.lender = self._lent

    async def recover(self, given: Sequence[Envelope]) -> None:
        """Restore the verdicts given before a restart, and serve the accepted files."""
        for envelope in given:
            self._docket.hear(envelope)
        for key in self._docket.judged_here():
            envelope = self._docket.signed_here(key)
            verdict = verdict_in(envelope)
            if verdict.outcome == "accepted":
                if not self._inbox.exists(key):
                    continue  # removed, because its step has closed
                self._serve(key, verdict)
                if envelope.body.expires_ms > self._peer.node.world.wall_time() * 1000:
                    self._peer.gossip.publish(envelope)
                else:
                    await self._peer.announce(verdict, VERDICT_LIFETIME_SECONDS)
            elif binds(verdict) and not verdict.proven_fault and self._inbox.exists(key):
                self._serve_refused(key, verdict)

    async def give(
        self, case: Case, outcome: Outcome, nursery: trio.Nursery, *, seconds: float = 0.0
    ) -> None:
        """Make a verdict durable, then publish it; `nursery` delivers; `seconds`: the checks'."""
        worker, submission, key = case.worker, case.submission, case.key
        decided = 0.0

        def verdict_at(log_index: int) -> Verdict:
            nonlocal outcome, decided
            # The worker may have been evicted while its case was judged or waited for the log.
            if not outcome.failed:
                outcome = self.if_evicted(worker) or outcome
            decided = self._peer.node.world.now()
            outcome.evidence = bet_once(outcome.evidence, outcome.word, self._others(key))
            return verdict_on(worker, submission, outcome, log_index)

        is_new = self._peer.run.evicted(worker) is None
        envelope = await self._trusted.append_verdict(verdict_at)  # evicts for a proven fault
        contradicting = self._docket.hear(envelope)
        self._inbox.let_go(key)
        verdict = verdict_in(envelope)
        if settles(verdict) and not verdict.proven_fault:
            await self._queue.settle(case)
        else:
            await self._queue.remove(key)
        if outcome.word == "accepted":
            self._serve(key, verdict)
        elif binds(verdict) and not verdict.proven_fault:
            self._serve_refused(key, verdict)
        else:
            if outcome.proven_fault and is_new:  # so that anyone can check it again
                fault = self._fault_of(case)
                if fault is not None and self._inbox.exists(key):
                    await self._trusted.faults.keep(fault, path_of(key))
            await self._inbox.remove(key)
        self._peer.gossip.publish(envelope)
        self._report(case, outcome, seconds, decided)
        report_contradictions(contradicting, envelope, self._peer.node.events)
        if case.first is None:
            nursery.start_soon(self._deliver_receipt, PeerId(worker), envelope)
        await evict_if_due(verdict, self._peer.run, self._trusted, self._records)
        self.given(case, verdict)

    async def revise(
        self, case: Case, verdict: Verdict, found: Outcome, nursery: trio.Nursery
    ) -> None:
        """Log the verdict of an audit; a refusal is published and acted on like any other."""

        def verdict_at(log_index: int) -> Verdict:
            revised = msgspec.structs.replace(
                verdict,
                log_index=log_index,
                outcome=found.word,
                checks=[*verdict.checks, *found.checks],
                failed=found.failed,
                detail=found.detail[:500],
                evidence=bet_once(found.evidence, found.word, self._others(case.key)),
            )
            return without_training(revised) if found.failed else revised

        envelope = await self._trusted.append_verdict(verdict_at)
        contradicting = self._docket.hear(envelope)
        revised = verdict_in(envelope)
        self._peer.node.events.emit(
            "validator.audited",
            **case.named,
            outcome=revised.outcome,
            failed=revised.failed,
            detail=revised.detail,
        )
        if revised.failed:
            await self._withdraw(case.key, verdict.submission, verdict.rollouts_digest)
            self._peer.gossip.publish(envelope)
            report_contradictions(contradicting, envelope, self._peer.node.events)
            nursery.start_soon(self._deliver_receipt, PeerId(case.worker), envelope)
        await evict_if_due(revised, self._peer.run, self._trusted, self._records)

    def _others(self, key: Key) -> list[Verdict]:
        opinions = self._docket.opinions_on(key)
        return [each for by, each in opinions.items() if by != self._peer.peer_id]

    def stands(self, key: Key) -> bool:
        """Whether this validator's acceptance stands: no refusal overrules it, no eviction."""
        envelope = self._docket.verdict_on(key)
        accepted = envelope is not None and verdict_in(envelope).outcome == "accepted"
        here = accepted and self._docket.is_judged_here(key) and self._inbox.exists(key)
        return here and self._peer.run.evicted(key[0]) is None

    def _lent(self, submission: bytes, worker: str) -> Fault | None:
        """The messages of a judged case, with which other validators give a second opinion."""
        case = self._queue.judged((worker, submission))
        return None if case is None else self._fault_of(case)

    def _fault_of(self, case: Case) -> Fault | None:
        """A case's signed messages; None if they prove nothing: no manifest, or another trainer."""
        signed = self._peer.run.version(case.order.run_digest)
        if signed is None:
            return None
        fault = Fault(case.announced, case.ordered, signed)
        return fault if fault.problem() is None else None

    def if_evicted(self, worker: str) -> Outcome | None:
        """The outcome for a submission of an evicted worker; None for any other worker."""
        refusal = first_failure([not_evicted], self._peer.run.evicted(worker))
        return None if refusal is None else Outcome.of(refusal)

    async def leave_to(self, quicker: PeerId, case: Case) -> None:
        """Drop a case that another settled: overload must not spread to all validators."""
        await self._queue.remove(case.key)
        await self._inbox.remove(case.key)
        self._peer.node.events.emit("validator.settled_elsewhere", **case.named, by=quicker)

    async def forget_older(self, oldest_age: int) -> None:
        """Forget verdicts and files of steps over `oldest_age` before the newest checkpoint."""
        newest = self._peer.newest_checkpoint()
        if newest is None:
            return
        oldest = newest.step - oldest_age
        for key in self._docket.too_old(newest, oldest):
            verdict = self._docket.verdict_here(key)
            if settles(verdict) and not verdict.proven_fault:
                await self._withdraw(key, verdict.submission, verdict.rollouts_digest)
            else:
                await self._inbox.remove(key)
        self._docket.forget_older(newest, oldest)

    async def _withdraw(self, key: Key, file: bytes, rollouts: bytes) -> None:
        """Stop serving a judged submission, and remove its files."""
        await self._queue.forget(key)
        self._peer.blobs.unregister(file)
        self._peer.blobs.unregister(rollouts)
        await self._inbox.remove(key)

    def _serve(self, key: Key, verdict: Verdict) -> None:
        """Serve an accepted file, and its rollouts in canonical form to the trainer."""
        # The hash identifies one worker's file, because the file's header names its worker.
        blobs = self._peer.blobs
        blobs.register(verdict.submission, path_of(key), 0, verdict.size_bytes)
        blobs.register(verdict.rollouts_digest, canonical_path_of(key), 0, verdict.rollouts_bytes)

    def _serve_refused(self, key: Key, verdict: Verdict) -> None:
        self._peer.blobs.register(verdict.submission, path_of(key), 0, verdict.size_bytes)

    def _report(self, case: Case, outcome: Outcome, seconds: float, decided: float) -> None:
        failed = failed_check(outcome.checks, outcome.failed)
        self._peer.node.events.emit(
            "validator.verdict",
            **case.named,
            outcome=outcome.word,
            failed=outcome.failed,
            figure=failed.figure if failed else 0.0,
            threshold=failed.threshold if failed else 0.0,
            detail=outcome.detail,
            nearest=nearest(outcome.checks),
            parts=mean_parts(
                each
                for group in range(len(outcome.rewards))
                for each in parts_in(outcome.parts, outcome.rewards, group)
            ),
            quarantined=len(outcome.ungraded) if outcome.rewards else 0,
            policy=case.submission.policy,
            second=case.first is not None,
            seconds=seconds,
            written_seconds=self._peer.node.world.now() - decided,
        )

    async def _deliver_receipt(self, worker: PeerId, envelope: Envelope) -> None:
        try:
            await self._peer.messenger.request(worker, envelope)
        except PeerError as error:
            self._peer.node.events.emit(
                "validator.receipt_undelivered", worker=worker, reason=str(error)
            )


def bet_once(evidence: Evidence, word: str, others: Sequence[Verdict]) -> Evidence:
    """A verdict's evidence, with no bets beside another's: two recomputations are one."""
    if any(each.recomputed and each.outcome == word for each in others):
        return without_bets(evidence)
    return evidence
