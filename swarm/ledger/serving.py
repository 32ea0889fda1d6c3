"""Serving this peer's log and mirrors to anyone who asks."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from swarm.errors import DECODE_ERRORS
from swarm.ledger import wire
from swarm.ledger.faults import FaultStore
from swarm.ledger.log import Log
from swarm.ledger.wire import ForkEvidence
from swarm.transport import Stream, Transport
from swarm.transport.rates import TokenBucket, TokenBuckets
from swarm.wire.envelope import Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Present
from swarm.world.tasks import Lifetime

ANSWER_BYTES_MAX = 512 * 1024
"""Most bytes of entries in one answer; a single entry always fits."""


READ_BYTES = 16 * 1024
"""Bytes of answers that count as one read. A read takes about 0.4 ms, in which a trusted peer does
nothing else: one proof, for example. Encrypting and sending so many bytes takes a quarter of it;
the rest pays for the line."""
READS_PER_SECOND = 250.0
"""Average reads per second for one peer that is not trusted, 4 MB/s at most."""
READS_BURST = 2000.0
PEERS_MAX = 4096
"""Peers and networks whose reads are counted; the least recent is forgotten."""
NETWORK_READS_PER_SECOND = 125.0
"""The same for all strangers of one /24 (IPv6: /48), or one of a private address."""
NETWORK_READS_BURST = 1000.0
STRANGERS_READS_PER_SECOND = 250.0
"""The same for all strangers together, because identities are free: a tenth of a core, 4 MB/s."""
STRANGERS_READS_BURST = 2000.0
ADMITTED_TIMES = 3.0
"""All admitted peers together, and those of one network, get so many times what strangers get."""
RESERVED_READS_PER_SECOND = 200.0
"""Beside these, for public networks while all peers have used up what they share."""
RESERVED_READS_BURST = 2000.0
NETWORK_RESERVED_READS_PER_SECOND = 8.0
"""Of these, for one network: twenty greedy ones leave something. The status of 1,000 members counts
as 8."""
NETWORK_RESERVED_READS_BURST = 200.0
PAGE_READS = 4
"""Reads that a page of entries, verdicts or bytes counts as, besides its bytes."""
WAIT_SECONDS = wire.REQUEST_SECONDS / 2
"""Whoever has waited so long is refused: its client would give up. No refusal comes sooner, since
one who is refused at once asks at once again, and each refusal costs 0.2 ms."""


class Reporting(Protocol):
    """What a trusted peer says about the run to `swarm status`."""

    def status(self) -> tuple[Sequence[bytes], Sequence[Present]]: ...
    def evaluation(self) -> bytes: ...
    def forks(self) -> Sequence[ForkEvidence]: ...


class Ledger(Reporting, Protocol):
    """The data that is served: see `swarm.node.trusted.TrustedPart`, which implements this."""

    @property
    def faults(self) -> FaultStore: ...
    def trusts(self, peer: str) -> bool: ...
    def admits(self, peer: str) -> bool: ...
    def log_of(self, owner: str) -> Log | None: ...
    async def head_of(self, owner: str) -> Envelope | None: ...
    def verdicts_of(
        self, worker: str, start: int, limit: int
    ) -> Sequence[tuple[int, bytes, bytes]]: ...
    def expulsions_of(self, peer: str) -> Sequence[bytes]: ...
    async def reinstate(self, raw: bytes) -> None: ...


class _Share:
    """The reads that strangers share, or those that admitted peers share."""

    def __init__(self, times: float = 1.0) -> None:
        """`times` what strangers get."""
        self.peers = TokenBuckets(READS_PER_SECOND, READS_BURST, PEERS_MAX)
        self.networks = TokenBuckets(
            times * NETWORK_READS_PER_SECOND, times * NETWORK_READS_BURST, PEERS_MAX
        )
        self.together = TokenBucket(
            times * STRANGERS_READS_PER_SECOND, times * STRANGERS_READS_BURST
        )
        self.reserve = TokenBucket(RESERVED_READS_PER_SECOND, RESERVED_READS_BURST)
        self.reserves = TokenBuckets(
            NETWORK_RESERVED_READS_PER_SECOND, NETWORK_RESERVED_READS_BURST, PEERS_MAX
        )
        self.lines: dict[str, trio.Lock] = {}

    @asynccontextmanager
    async def first_of(self, line: str) -> AsyncIterator[None]:
        """Wait in a line, and be its first inside the block."""
        lock = self.lines.setdefault(line, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():  # nobody waits in it
                self.lines.pop(line, None)


class Rations:
    """What peers that are not trusted may read: processor time and bytes, in reads.

    Whoever is over a rate waits, and one who asks at once again after each answer gets no more
    work out of this peer than its rate. Only the first request of each peer waits for the network's
    rate, and only the first of each network for the rate that all share, so that neither streams
    nor identities push an honest reader back. A public network has a small rate of its own besides.
    """

    def __init__(
        self, admits: Callable[[PeerId], bool], network_of: Callable[[PeerId], str]
    ) -> None:
        """`network_of` returns an empty string for private and relayed addresses. Identities are
        free there: nothing is reserved for them."""
        self._admits = admits
        self._network_of = network_of
        self._strangers, self._admitted = _Share(), _Share(ADMITTED_TIMES)

    async def admit(self, peer: PeerId, reads: float) -> Sequence[TokenBucket]:
        """Wait for the rates; raises `ValueError` after `WAIT_SECONDS`.

        Returns the buckets of which the answer's bytes are to be taken."""
        share = self._admitted if self._admits(peer) else self._strangers
        network = self._network_of(peer)
        own = share.peers.of(peer), share.networks.of(network or peer)
        refusal = "you or your network read too much of the ledger here; ask later"
        with trio.move_on_after(WAIT_SECONDS):
            async with share.first_of(f"peer {peer}"):
                await _out_of_debt(own[0])
                async with share.first_of(f"network {network or peer}"):
                    await _out_of_debt(own[1])
                    refusal = "too many peers read the ledger here; ask again in a minute"
                    shared = await self._paid(share, network, reads)
                    for bucket in own:
                        bucket.borrow(reads, trio.current_time())
                    return [*own, *shared]
        raise ValueError(refusal)

    @staticmethod
    async def _paid(share: _Share, network: str, reads: float) -> Sequence[TokenBucket]:
        """Wait until the reads can be taken of a bucket that others share; returns what paid."""
        now = trio.current_time()
        if share.together.take(reads, now):
            return [share.together]
        if network:
            reserve = share.reserves.of(network)
            if reserve.left(now) > 0 and share.reserve.take(reads, now):
                reserve.borrow(reads, now)
                return [reserve, share.reserve]
        async with share.first_of("together"):
            await _out_of_debt(share.together)
            share.together.borrow(reads, trio.current_time())
        return [share.together]

    @staticmethod
    def charge(buckets: Sequence[TokenBucket], size_bytes: int) -> None:
        """Count the bytes of an answer, into debt if needed: the next one waits for them."""
        for bucket in buckets:
            bucket.borrow(size_bytes / READ_BYTES, trio.current_time())

    @property
    def waiting(self) -> list[str]:
        """The lines in which somebody waits."""
        return [line for s in (self._strangers, self._admitted) for line in s.lines]

    @property
    def remembered(self) -> int:
        """The number of peers and networks whose reads are counted."""
        shares = (self._strangers, self._admitted)
        return sum(len(s.peers) + len(s.networks) + len(s.reserves) for s in shares)


async def _out_of_debt(bucket: TokenBucket) -> None:
    if seconds := bucket.debt_seconds(trio.current_time()):
        await trio.sleep(seconds)


class Answers:
    """Answers requests with encoded answers; the status is encoded once each time it is made."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._made: tuple[object, bytes] = (None, b"")
        """The last status and result on held-out tasks."""
        self._status = b""

    async def answer(self, request: wire.Request) -> bytes:
        """Raises `ValueError`."""
        if isinstance(request, wire.StatusRequest):
            return self.status()
        return wire.encoder.encode(await _answer(self._ledger, request))

    def status(self) -> bytes:
        newest, result = self._ledger.status(), self._ledger.evaluation()
        if newest is not self._made[0] or result != self._made[1]:
            self._made = newest, result
            self._status = wire.encoder.encode(report(self._ledger))
        return self._status


@asynccontextmanager
async def serving_ledger(transport: Transport, ledger: Ledger) -> AsyncIterator[None]:
    """Serve the held logs inside the block, once per transport; strangers get `Rations`."""
    rations = Rations(ledger.admits, transport.network_of)
    answers = Answers(ledger)

    async def converse(stream: Stream) -> None:
        limited = not ledger.trusts(stream.peer)
        while True:
            with trio.move_on_after(wire.REQUEST_SECONDS) as idle:
                raw = await stream.receive()
            if idle.cancelled_caught or raw is None:
                return
            try:
                request = wire.request_decoder.decode(raw)
                charged = await rations.admit(stream.peer, _reads(request)) if limited else ()
                answer = await answers.answer(request)
                rations.charge(charged, len(answer))
            except (ValueError, *DECODE_ERRORS) as error:
                answer = wire.encoder.encode(wire.Refusal(str(error)[:500]))
            await stream.send(answer)

    async with Lifetime() as lifetime:
        transport.serve(
            wire.PROTOCOL,
            lambda stream: lifetime.run(converse, stream),
            frame_bytes_max=wire.REQUEST_BYTES_MAX,
        )
        yield


def _reads(request: wire.Request) -> int:
    """About how many proofs take as long as making an answer; its bytes count besides."""
    if isinstance(request, wire.InclusionsRequest):
        return max(1, len(request.indices))
    pages = (wire.EntriesRequest, wire.VerdictsRequest, wire.FaultFileRequest)
    return PAGE_READS if isinstance(request, pages) else 1


async def _answer(ledger: Ledger, request: wire.Request) -> wire.Answer:
    if isinstance(request, wire.VerdictsRequest):
        return _verdicts(ledger, request)
    if isinstance(request, wire.StatusRequest):
        return report(ledger)
    if isinstance(request, wire.ExpulsionsRequest):
        envelopes = list(ledger.expulsions_of(request.peer))[-wire.EXPULSIONS_MAX :]
        return wire.Expulsions(envelopes)
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
        return wire.Origin(log.start(), log.peaks())
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
    page = freshest[: min(fitting, 8192)]
    return wire.Status(list(envelopes), page, forks, evaluation=ledger.evaluation())


def _fitting(sizes: Sequence[int]) -> int:
    """How many of the first items fit into one answer; at least one."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > ANSWER_BYTES_MAX and count > 0:
            return count
    return len(sizes)
