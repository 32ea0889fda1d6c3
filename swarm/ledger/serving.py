"""Serving this peer's log and mirrors to anyone who asks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from swarm.envelope import Envelope
from swarm.errors import DECODE_ERRORS
from swarm.identity import PeerId
from swarm.ledger import wire
from swarm.ledger.client import LedgerClient
from swarm.ledger.faults import FaultStore
from swarm.ledger.forks import ForkEvidence
from swarm.ledger.log import Log
from swarm.ledger.sealing import sealed_size
from swarm.lifetime import Lifetime
from swarm.messages import Present
from swarm.rates import TokenBucket, TokenBuckets
from swarm.transport import Stream, Transport

ANSWER_BYTES_MAX = 512 * 1024
"""Most bytes of entries in one answer; a single entry always fits."""


READS_PER_SECOND = 250.0
"""Average reads per second for one peer that is not trusted. A read, for example of one proof,
takes about 0.4 ms, in which a trusted peer does nothing else."""
READS_BURST = 2000.0
PEERS_MAX = 4096
"""Peers whose reads are counted; the least recent is forgotten."""
STRANGERS_READS_PER_SECOND = 750.0
STRANGERS_READS_BURST = 6000.0
"""The same for all peers together that are not trusted, because identities are free."""
PAGE_READS = 4
"""Reads that a page of entries, verdicts or bytes counts as."""


class Revocations(Protocol):
    """The log of revoked invites (implemented by `swarm.node.invites.Invites`)."""

    async def revoke(self, raw: bytes) -> None:
        """Log the owner's signed `InviteRevocation`; raises `ValueError`."""
        ...


class Reporting(Protocol):
    """What a trusted peer says about the run to `swarm status`."""

    def status(self) -> tuple[Sequence[bytes], Sequence[Present]]:
        """The newest manifest, checkpoint and step order, and the peers that are present."""
        ...

    def evaluation(self) -> bytes:
        """The newest signed result on held-out tasks; empty without one."""
        ...

    def forks(self) -> Sequence[ForkEvidence]:
        """Contradictory heads of other trusted peers' logs."""
        ...

    def contradictions(self, limit: int) -> tuple[int, list[wire.Contradiction]]:
        """The number of contradictions between validators, and the newest."""
        ...


class Ledger(Reporting, Protocol):
    """The data that is served (implemented by `swarm.node.trusted.TrustedPart`)."""

    @property
    def invites(self) -> Revocations: ...

    def trusts(self, peer: str) -> bool:
        """Whether a peer mirrors the logs, so that its requests have no limit."""
        ...

    def log_of(self, owner: str) -> Log | None:
        """The log or mirror of a trusted peer; None if this peer holds none."""
        ...

    async def head_of(self, owner: str) -> Envelope | None:
        """The newest signed head of a log of which this peer holds all entries."""
        ...

    def verdicts_of(
        self, worker: str, start: int, limit: int
    ) -> Sequence[tuple[int, bytes, bytes]]:
        """(log index, entry, envelope) of this peer's own verdicts on a worker's submissions."""
        ...

    async def reinstate(self, raw: bytes) -> None:
        """Log and spread the owner's signed `Reinstatement`; raises `ValueError`."""
        ...

    def expulsions_of(self, peer: str) -> Sequence[bytes]:
        """The known signed evictions and reinstatements of a peer, newest last."""
        ...

    def reinstated_at(self, peer: str) -> int:
        """The index of a peer's last reinstatement in this peer's own log; -1 for none."""
        ...

    @property
    def faults(self) -> FaultStore:
        """The evidence of proven faults that this peer keeps."""
        ...


@asynccontextmanager
async def serving_ledger(transport: Transport, ledger: Ledger) -> AsyncIterator[None]:
    """Serve the logs held here inside the block; once per transport.

    A peer that asks more than its rate waits; if all together do, they are refused.
    """
    reads = TokenBuckets(READS_PER_SECOND, READS_BURST, PEERS_MAX)
    together = TokenBucket(STRANGERS_READS_PER_SECOND, STRANGERS_READS_BURST)

    async def admit(peer: PeerId, request: wire.Request) -> None:
        """Wait for the peer's rate; raises `ValueError` if this peer answers too many already."""
        if ledger.trusts(peer):
            return
        cost = _reads(request)
        own = reads.of(peer)
        own.borrow(cost, trio.current_time())
        await trio.sleep(own.debt_seconds(trio.current_time()))
        if not together.take(cost, trio.current_time()):
            raise ValueError("too many peers read the ledger here; ask again in a minute")

    async def converse(stream: Stream) -> None:
        while True:
            with trio.move_on_after(wire.REQUEST_SECONDS) as idle:
                raw = await stream.receive()
            if idle.cancelled_caught or raw is None:
                return
            try:
                request = wire.request_decoder.decode(raw)
                await admit(stream.peer, request)
                answer = await _answer(ledger, request)
            except (ValueError, *DECODE_ERRORS) as error:
                answer = wire.Refusal(str(error)[:500])
            await stream.send(wire.encoder.encode(answer))

    async with Lifetime() as lifetime:
        transport.serve(
            wire.PROTOCOL,
            lambda stream: lifetime.run(converse, stream),
            frame_bytes_max=wire.REQUEST_BYTES_MAX,
        )
        yield


class _OwnStream:
    """A stream on which a peer asks itself: nothing leaves the process."""

    protocol = wire.PROTOCOL

    def __init__(self, ledger: Ledger, peer: PeerId) -> None:
        self.peer, self._ledger = peer, ledger
        self._answer = b""

    async def send(self, frame: bytes) -> None:
        try:
            answer = await _answer(self._ledger, wire.request_decoder.decode(frame))
        except ValueError as error:
            answer = wire.Refusal(str(error)[:500])
        self._answer = wire.encoder.encode(answer)

    async def receive(self) -> bytes | None:
        await trio.lowlevel.checkpoint()
        return self._answer

    async def end(self) -> None: ...

    async def reset(self) -> None: ...


def own_client(ledger: Ledger, peer: PeerId) -> LedgerClient:
    """A client of this peer's own ledger: trusted peers are not connected to themselves."""
    return LedgerClient(_OwnStream(ledger, peer))


def _reads(request: wire.Request) -> int:
    """About how many proofs take as long as the answer to a request."""
    if isinstance(request, wire.InclusionsRequest):
        return max(1, len(request.indices))
    pages = (wire.EntriesRequest, wire.VerdictsRequest, wire.FaultFileRequest)
    return PAGE_READS if isinstance(request, pages) else 1


async def _answer(ledger: Ledger, request: wire.Request) -> wire.Answer:
    if isinstance(request, wire.VerdictsRequest):
        return _verdicts(ledger, request)
    if isinstance(request, wire.StatusRequest):
        return report(ledger)
    if isinstance(request, wire.RevokeInviteRequest):
        await ledger.invites.revoke(request.envelope)
        return wire.Logged()
    if isinstance(request, wire.ExpulsionsRequest):
        envelopes = list(ledger.expulsions_of(request.peer))[-wire.EXPULSIONS_MAX :]
        return wire.Expulsions(envelopes, ledger.reinstated_at(request.peer))
    if isinstance(request, wire.ReinstateRequest):
        await ledger.reinstate(request.envelope)
        return wire.Expulsions([request.envelope])
    if isinstance(request, wire.HeadRequest):
        head = await ledger.head_of(request.owner)
        return wire.Head(head.raw if head is not None else b"")
    if isinstance(request, wire.FaultRequest):
        return wire.FaultFound(*ledger.faults.record(request.submission, request.worker))
    if isinstance(request, wire.FaultFileRequest):
        return wire.FaultBytes(
            await ledger.faults.read(request.submission, request.start, wire.FAULT_BYTES_MAX)
        )
    log = ledger.log_of(request.owner)
    if log is None:
        raise ValueError(f"no log of {request.owner} is held here")
    if isinstance(request, wire.EntriesRequest):
        count = _fitting(log.entry_sizes(request.start, request.count))
        return wire.Entries(log.entries(request.start, count))
    if isinstance(request, wire.OriginRequest):
        return wire.Origin(log.start(), log.peaks(), sealed_size(log))
    if isinstance(request, wire.InclusionsRequest):
        return wire.Proofs([log.inclusion(index, request.size) for index in request.indices])
    return wire.Proof(log.consistency(request.old, request.new))


def _verdicts(ledger: Ledger, request: wire.VerdictsRequest) -> wire.Verdicts:
    rows = ledger.verdicts_of(request.worker, request.start, request.limit)
    rows = rows[: _fitting([len(entry) + len(envelope) for _, entry, envelope in rows])]
    return wire.Verdicts([wire.LoggedVerdict(*row) for row in rows])


def report(ledger: Reporting) -> wire.Status:
    """The answer to a status request, with as many peers as fit, the freshest."""
    envelopes, present = ledger.status()
    freshest = sorted(present, key=lambda entry: (entry.age_seconds, entry.peer))
    fitting = _fitting([len(wire.encoder.encode(entry)) for entry in freshest])
    forks = list(ledger.forks())[: wire.FORKS_MAX]
    count, contradictions = ledger.contradictions(wire.CONTRADICTIONS_MAX)
    page = freshest[: min(fitting, 8192)]
    return wire.Status(
        list(envelopes), page, forks, count, contradictions, evaluation=ledger.evaluation()
    )


def _fitting(sizes: Sequence[int]) -> int:
    """How many of the first items fit into one answer; at least one."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > ANSWER_BYTES_MAX and count > 0:
            return count
    return len(sizes)
