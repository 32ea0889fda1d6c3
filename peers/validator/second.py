"""Second opinions: submissions judged by others that this validator draws, with its own secret,
after their verdict; always those that skipped it although it ranks before the judge. So a worker
gains nothing by choosing its validator, and one that accepts everything or refuses one worker is
contradicted (`verdicts.contradict`)."""

from collections.abc import Callable

import trio

from peers.validator.cases import Case, slot_of
from peers.validator.docket import Docket
from peers.validator.draws import draw_secret, prefill_wanted
from peers.validator.inbox import Inbox, path_of
from peers.validator.queue import CaseQueue
from swarm.errors import PeerError
from swarm.ledger.client import open_ledger
from swarm.ledger.entries import Judged, decode
from swarm.ledger.faults import Fault
from swarm.ledger.ruling import settles
from swarm.node.run_node import RunNode
from swarm.node.trusted import TrustedPart
from swarm.rollouts.seeds import digest
from swarm.run.heard_verdicts import verdict_in
from swarm.run.work import judges_of
from swarm.transport import BlobReference
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Verdict

ENTRIES_RECOVERED = 4096
"""Newest entries of another's log that a restarted one draws from again; decoding takes 40 ms."""

RECOVERY_SECONDS = 10.0
"""Time after a start in which the mirrors catch up, and gossip repeats the newest verdicts."""

WAITING_MAX = 64
"""Verdicts that wait to be checked; further ones are left unchecked."""


class SecondOpinions:
    """Draws other validators' verdicts, fetches their files and queues them."""

    def __init__(
        self, peer: RunNode, trusted: TrustedPart, docket: Docket, inbox: Inbox, queue: CaseQueue
    ) -> None:
        self._peer = peer
        self._docket = docket
        self._inbox = inbox
        self._queue = queue
        self._trusted = trusted
        self._secret = digest("swarm/1/second", draw_secret(peer))
        self._since_ms = peer.node.world.wall_time() * 1000
        """A verdict issued before did not skip this validator: it was not there to be asked."""
        self._drawn, self._to_fetch = trio.open_memory_channel[Envelope](WAITING_MAX)

    def hear(self, envelope: Envelope) -> None:
        """Take note of a verdict, before the docket does."""
        verdict, here = verdict_in(envelope), self._peer.peer_id
        key = (verdict.worker, verdict.submission)
        if envelope.sender == here or not settles(verdict) or verdict.proven_fault:
            return
        if self._docket.opinions_on(key) or self._queue.find(key) is not None:
            return  # not the first verdict, or the worker has asked this validator too
        skipped = envelope.body.issued_ms >= self._since_ms and self._was_skipped(
            envelope.sender, verdict
        )
        if skipped or self._is_drawn(verdict.submission):
            try:
                self._drawn.send_nowait(envelope)
            except trio.WouldBlock:
                return

    def _is_drawn(self, submission: bytes) -> bool:
        manifest = self._peer.run.manifest
        others = max(1, len(manifest.validator_ids()) - 1)
        return prefill_wanted(self._secret, submission, manifest.thresholds.second_share / others)

    def _was_skipped(self, judge: str, verdict: Verdict) -> bool:
        """Whether this validator comes before the judge in rank, and was not asked."""
        validators = self._peer.run.manifest.validator_ids()
        order = self._docket.orders.find(verdict.lineage, verdict.step)
        taken = self._docket.taken(slot_of(verdict.worker, verdict))
        if order is None or judge not in validators:
            return False
        acknowledged_here = (
            taken is not None
            and taken.receipt is not None
            and taken.receipt.sender == self._peer.peer_id
        )
        ranks = judges_of(validators, order.nonce, verdict.worker, verdict.number)
        return ranks.index(self._peer.peer_id) < ranks.index(judge) and not acknowledged_here

    async def recover(self, hear: Callable[[Envelope], None]) -> None:
        """Draw again from the others' recent logs; `hear` gets verdicts as from gossip."""
        await trio.sleep(RECOVERY_SECONDS)
        run = self._peer.run
        for judge in run.manifest.validator_ids():
            due = self._due(judge) if judge != self._peer.peer_id else []
            if not due:
                continue
            try:
                await self._peer.node.reach(PeerId(judge))
                async with open_ledger(self._peer.node.transport, PeerId(judge)) as client:
                    for index, worker in due:
                        page = await client.verdicts(worker, index)
                        envelope = open_envelope(page[0].envelope) if page else None
                        if envelope is None or envelope.body.run != run.id:
                            continue
                        if isinstance(envelope.message, Verdict) and envelope.sender == judge:
                            hear(envelope)
            except (PeerError, Dropped) as error:
                self._peer.node.events.emit(
                    "validator.second_opinions_lost",
                    by=judge,
                    submissions=len(due),
                    reason=str(error),
                )

    def _due(self, judge: str) -> list[tuple[int, str]]:
        """A validator's index and worker of its newest drawn verdicts that are not judged here."""
        log = self._trusted.log_of(judge)
        assert log is not None
        start = max(log.start(), log.size() - ENTRIES_RECOVERED)
        entries = list(enumerate(map(decode, log.entries(start, ENTRIES_RECOVERED)), start))
        judged = [(index, entry) for index, entry in entries if isinstance(entry, Judged)]
        newest = max(((entry.lineage, entry.step) for _, entry in judged), default=(0, 0))
        oldest = (newest[0], newest[1] - self._peer.run.max_staleness)
        return [
            (index, entry.worker)
            for index, entry in judged
            if (entry.lineage, entry.step) >= oldest
            and settles(entry)
            and not entry.proven_fault
            and not self._docket.is_judged_here((entry.worker, entry.submission))
            and self._is_drawn(entry.submission)
        ][-WAITING_MAX:]

    async def run(self) -> None:
        """Fetch what was drawn, until cancelled."""
        async for envelope in self._to_fetch:
            verdict = verdict_in(envelope)
            try:
                await self._fetch(PeerId(envelope.sender), envelope, verdict)
            except (PeerError, ValueError) as error:
                self._peer.node.events.emit(
                    "validator.second_opinion_failed",
                    submission=verdict.submission,
                    by=envelope.sender,
                    reason=str(error),
                )

    async def _fetch(self, judge: PeerId, envelope: Envelope, verdict: Verdict) -> None:
        node = self._peer.node
        await node.reach(judge)
        async with open_ledger(node.transport, judge) as client:
            found = await client.fault(verdict.submission, verdict.worker)
        if found is None:
            raise PeerError("it no longer holds the announcement")
        fault = found[0].opened
        self._check(fault, verdict)
        key = (verdict.worker, verdict.submission)
        # From now on: its worker may push and announce it here too, and is told of the verdict.
        self._inbox.hold(key, verdict.size_bytes)
        try:
            if not node.disk.exists(path_of(key)):
                path = path_of(key) + ".second"
                wanted = BlobReference(verdict.submission, verdict.size_bytes)
                await node.fetch_file(judge, wanted, path)
                await node.disk.rename(path, path_of(key))
                await node.disk.sync(path_of(key))
        except BaseException:
            self._inbox.let_go(key)
            raise
        self._queue.put(Case(fault.announced, fault.ordered, first=envelope))

    def _check(self, fault: Fault, verdict: Verdict) -> None:
        """Raise `PeerError` unless the announcement is of this submission, in this run."""
        run = self._peer.run
        named = (fault.worker, fault.submission.digest, fault.submission.number)
        if (
            named != (verdict.worker, verdict.submission, verdict.number)
            or fault.announced.body.run != run.id
            or run.permits(fault.ordered.sender, fault.order) is not None
        ):
            raise PeerError("its announcement or step order is of something else")
