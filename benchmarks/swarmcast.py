"""A broadcast by shardcast alone: every peer has the production store, exchange, fetcher and
uploads, but nothing else of a run, so that a thousand peers and 62 GB take minutes.

Each peer is connected to some random other peers, as by gossip, and the checkpoint's announcement
reaches all peers at the same time. In `open` mode every receiver forwards pieces. In `relay-only`
mode only relays do, and receivers know no other peers. With churn, receivers leave at even
intervals, and empty receivers replace them. `bound` is the least time of any broadcast
(docs/shardcast.md).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from simnet.clock import SimulatedWorld, derive, run_virtual, source
from simnet.disk import SimulatedDisk
from simnet.extents import Symbol
from simnet.lines import REGIONS, Line, Weather
from simnet.network import SimulatedNetwork
from simnet.simulation import Trace
from simnet.transport import SimulatedTransport
from swarm.events import Event, Events
from swarm.shardcast.fetch.fetcher import Fetcher
from swarm.shardcast.have.streams import HaveExchange
from swarm.shardcast.service import BlobService
from swarm.shardcast.store import CheckpointStore
from swarm.shardcast.uploads import Uploads
from swarm.transport import ConnectError, Source
from swarm.wire.identity import Identity, PeerId
from swarm.wire.messages import Checkpoint

RUN = "owner/broadcast"
CONNECTIONS = 6
"""Connections that each peer opens to random peers; on average as many are opened to it."""
FRAME_OVERHEAD_BYTES = 100
"""Most overhead of a message on a connection: headers of TCP and IP, Noise, yamux."""
RELAY_CONNECTIONS = 12
"""Relays that a receiver first connects to in relay-only mode."""
SOURCE_CONNECTIONS = 24
FILES = 13
"""Approximate number of files of a 62 GB model."""
DEADLINE_SECONDS = 1e6
PROGRESS_SECONDS = 10.0

GIGABIT = 125e6
UPLINKS = ((0.1, GIGABIT), (0.4, 0.2 * GIGABIT), (0.5, 0.05 * GIGABIT))
"""Uplinks of the headline profile: (share of the receivers, bytes per second)."""
RELAY_SHARE = 0.1
"""Relays per receiver in relay-only mode, on 1 Gb/s lines."""


@dataclass(frozen=True)
class Case:
    """One broadcast to simulate: its size, peers and churn."""

    seed: int
    size_bytes: int
    source: Line
    receivers: Sequence[Line]
    relays: Sequence[Line] = ()
    """The relays' lines. If there are any, receivers forward nothing."""
    churn: float = 0.0
    """Share of the receivers that leaves."""


def headline(
    peers: int, seed: int, *, size_bytes: int, relay_only: bool = False, churn: float = 0.0
) -> Case:
    """Make a case of the headline profile: uplinks of `UPLINKS`, downlinks of 500 Mb/s or the
    uplink, whichever is more."""
    chance = source(seed, "profile")
    uplinks: list[float] = []
    for share, uplink in UPLINKS:
        uplinks += [uplink] * round(share * peers)
    uplinks = (uplinks + [UPLINKS[-1][1]] * peers)[:peers]
    chance.shuffle(uplinks)
    lines = [Line(chance.choice(REGIONS), up, max(up, 0.5 * GIGABIT)) for up in uplinks]
    relays = round(peers * RELAY_SHARE) if relay_only else 0
    fast = [Line(chance.choice(REGIONS), GIGABIT, GIGABIT) for _ in range(relays)]
    return Case(seed, size_bytes, Line("us-east", GIGABIT, GIGABIT), lines, fast, churn)


def bound(case: Case) -> dict[str, float]:
    """Terms of the least time of any broadcast, in seconds; the largest binds."""
    return bound_of(case, len(case.receivers) - leavers(case))


def leavers(case: Case) -> int:
    """Number of receivers that leave.

    New receivers on the same lines replace them, so that the total of uplinks stays the same. Only
    receivers that stay all the time count.
    """
    return round(case.churn * len(case.receivers))


def bound_of(case: Case, finishers: int) -> dict[str, float]:
    """`bound` for the first `finishers` receivers to finish."""
    size = case.size_bytes
    senders = case.relays or [case.source, *case.receivers]
    uplinks = sum(line.uplink_bytes_per_second for line in senders)
    return {
        "source": size / case.source.uplink_bytes_per_second,
        "downlink": size / min(line.downlink_bytes_per_second for line in case.receivers),
        "capacity": finishers * size / uplinks,
    }


@dataclass
class Outcome:
    """The result of a broadcast; times in virtual seconds since the announcement."""

    finished: dict[int, float] = field(default_factory=dict)
    """Time at which each receiver that stayed all the time had verified and stored everything."""
    progress: list[tuple[float, float]] = field(default_factory=list)
    """(time, bytes per second on all uplinks, as a share of their capacity)."""
    pieces: int = 0
    sent_by_receivers: int = 0
    """Bytes of pieces that receivers forwarded."""
    sent_in_pieces: int = 0
    """Bytes of pieces sent by all peers present at the end."""
    sent_in_messages: int = 0
    """Bytes of messages on connections, which say who has which pieces, with their overhead."""
    trace_hash: str = ""
    cpu_seconds: float = 0.0


class CastPeer:
    """One peer: the part of `swarm.node` that moves checkpoints."""

    def __init__(self, cast: Cast, name: str, line: Line) -> None:
        self.cast = cast
        self.name = name
        self.line = line
        self.serves = True
        self.may_know: Sequence[CastPeer] | None = None
        """The only peers that it may know; None: all."""
        seed = cast.case.seed
        self.identity = Identity(derive(seed, "key", name))
        self.world = SimulatedWorld(seed, name)
        self.disk = SimulatedDisk(name, capacity_bytes=1 << 44)
        self.events = Events(self.world, self.identity.peer_id)
        self.events.add_sink(self._hear)
        self.scope = trio.CancelScope()
        """Scope of its process."""
        self.fetching = trio.CancelScope()
        self.transport: SimulatedTransport
        self.store: CheckpointStore
        self.fetcher: Fetcher
        self.uploads: Uploads
        self.have: HaveExchange

    @property
    def id(self) -> PeerId:
        return self.identity.peer_id

    def _hear(self, event: Event) -> None:
        self.cast.trace.add(trio.current_time(), event.name, self.name, event.fields)

    async def live(self, *, task_status: trio.TaskStatus[None]) -> None:
        with self.scope:
            async with (
                self.cast.network.transport(
                    self.identity, world=self.world, disk=self.disk, line=self.line
                ) as transport,
                trio.open_nursery() as nursery,
            ):
                self.transport = transport
                self.store = CheckpointStore(self.disk, RUN, self.events)
                self.uploads = Uploads(self.world, transport, self.store)
                self.have = HaveExchange(
                    self.world,
                    transport,
                    self.store,
                    self.events,
                    uploads=self.uploads,
                    meet=self._meet,
                    tells=lambda: self.serves,
                )
                self.fetcher = Fetcher(
                    self.world, transport, self.store, self.events, have=self.have
                )
                transport.serve_bulk(
                    BlobService(
                        lambda peer, credential: self.serves, store=self.store, uploads=self.uploads
                    )
                )
                await nursery.start(self.have.run)
                task_status.started()
                await trio.sleep_forever()

    async def connect(self, others: Sequence[CastPeer]) -> None:
        """Connect to those of `others` that are present."""
        for other in others:
            if not other.scope.cancel_called:
                try:
                    await self.transport.connect(other.id, other.transport.addresses())
                except ConnectError:
                    continue  # it has left meanwhile

    async def _meet(self) -> PeerId | None:
        """Connect to one more peer, drawn at random."""
        for _ in range(8):
            other = self.world.random.choice(self.may_know or self.cast.peers)
            if other is not self and other.id not in self.transport.connected():
                await self.connect([other])
                return other.id
        return None

    def sources(self) -> list[Source]:
        connected = self.transport.connected()
        if self.may_know is None:
            return [Source(peer) for peer in connected]
        known = {peer.id for peer in self.may_know}
        return [Source(peer) for peer in connected if peer in known]


class Cast:
    """One simulated broadcast."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.network = SimulatedNetwork(case.seed, Weather())
        self.trace = Trace()
        self.chance = source(case.seed, "broadcast")
        self.outcome = Outcome()
        self.origin = CastPeer(self, "source", case.source)
        self.relays = [CastPeer(self, f"relay {n}", line) for n, line in enumerate(case.relays)]
        self.receivers = [
            CastPeer(self, f"peer {n}", line) for n, line in enumerate(case.receivers)
        ]
        self.peers = [self.origin, *self.relays, *self.receivers]
        self.began = 0.0
        self._waiting = len(self.receivers)
        self._over = trio.Event()

    async def run(self) -> None:
        async with self.network.running(), trio.open_nursery() as nursery:
            for peer in self.peers:
                await nursery.start(peer.live)
            async with trio.open_nursery() as connecting:
                for peer in self.peers:
                    connecting.start_soon(peer.connect, self._acquaintances(peer))
            checkpoint = await self._publish()
            self.began = trio.current_time()
            nursery.start_soon(self._watch)
            for relay in self.relays:
                nursery.start_soon(self._fetch, relay, checkpoint, -1)
            for number, peer in enumerate(self.receivers):
                nursery.start_soon(self._fetch, peer, checkpoint, number)
            nursery.start_soon(self._churn, checkpoint, nursery)
            await self._over.wait()
            sent = {peer: peer.transport.traffic.sent for peer in self.peers}
            self.outcome.sent_by_receivers = sum(sent[peer] for peer in self.receivers)
            self.outcome.sent_in_pieces = sum(sent.values())
            overhead = FRAME_OVERHEAD_BYTES * self.network.messages
            self.outcome.sent_in_messages = self.network.bytes_sent + overhead
            nursery.cancel_scope.cancel()

    def _acquaintances(self, peer: CastPeer) -> list[CastPeer]:
        """The peers that a peer connects to."""
        if self.relays and peer not in self.relays:
            # Receivers and the source know only relays.
            peer.may_know = self.relays
            peer.serves = peer is self.origin
            count = SOURCE_CONNECTIONS if peer is self.origin else RELAY_CONNECTIONS
            return self._some(self.relays, count)
        if self.relays:
            peer.may_know = [self.origin, *(other for other in self.relays if other is not peer)]
            return self._some(peer.may_know, CONNECTIONS)
        count = SOURCE_CONNECTIONS if peer is self.origin else CONNECTIONS
        others = [other for other in self.receivers if other is not peer]
        return self._some([other for other in others if not other.scope.cancel_called], count)

    def _some(self, peers: Sequence[CastPeer], count: int) -> list[CastPeer]:
        return self.chance.sample(peers, min(count, len(peers)))

    async def _publish(self) -> Checkpoint:
        size = self.case.size_bytes
        each = -(-size // FILES)
        for number in range(FILES):
            start = number * each
            part = Symbol("weights", start, min(each, size - start))
            self.origin.disk.put(f"made/model-{number:05d}.safetensors", 0, part)
        held = await self.origin.store.publish("made", 0, 1)
        return Checkpoint(reference=held.reference, total_bytes=held.manifest.total_bytes)

    async def _fetch(self, peer: CastPeer, checkpoint: Checkpoint, number: int) -> None:
        """Fetch until the peer has everything or leaves; the broadcast waits for numbered peers."""
        with peer.fetching:
            await peer.fetcher.fetch(checkpoint, peer.sources, deadline_seconds=DEADLINE_SECONDS)
            if number >= 0:
                self.outcome.finished[number] = trio.current_time() - self.began
        if number >= 0:
            self._waiting -= 1
            if not self._waiting:
                self._over.set()

    async def _churn(self, checkpoint: Checkpoint, nursery: trio.Nursery) -> None:
        """Make receivers leave, evenly over the bound's time, and new receivers join."""
        count = leavers(self.case)
        if not count:
            return
        seconds = max(bound(self.case).values())
        leaving = self.chance.sample(range(len(self.receivers)), count)
        for turn, number in enumerate(leaving):
            await trio.sleep_until(self.began + seconds * (turn + 0.5) / count)
            old = self.receivers[number]
            if number in self.outcome.finished:
                del self.outcome.finished[number]
            old.fetching.cancel()
            old.scope.cancel()
            new = CastPeer(self, f"newcomer {turn}", old.line)
            self.peers[self.peers.index(old)] = self.receivers[number] = new
            nursery.start_soon(self._arrive, new, checkpoint, nursery)

    async def _arrive(self, peer: CastPeer, checkpoint: Checkpoint, nursery: trio.Nursery) -> None:
        await nursery.start(peer.live)
        await peer.connect(self._acquaintances(peer))
        await self._fetch(peer, checkpoint, -1)

    async def _watch(self) -> None:
        while True:
            await trio.sleep(PROGRESS_SECONDS)
            senders = [peer for peer in self.peers if peer.serves]
            there = sum(peer.line.uplink_bytes_per_second for peer in senders)
            used = self.network.flows.total_rate()
            self.outcome.progress.append((trio.current_time() - self.began, used / there))


def broadcast(case: Case) -> Outcome:
    """Simulate one broadcast."""
    cast = Cast(case)
    cpu = time.process_time()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        run_virtual(cast.run, seed=case.seed)
    finally:
        gc.enable()
        gc.unfreeze()
    outcome = cast.outcome
    outcome.cpu_seconds = time.process_time() - cpu
    outcome.pieces = cast.trace.counts["shardcast.piece_received"]
    outcome.trace_hash = cast.trace.digest()
    return outcome
