"""The state of one running fetch: its sources, its running requests, and its missing pieces.

`Arriving` says how the newest checkpoint comes to this peer, for its heartbeat."""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import trio
from blake3 import blake3

from swarm.errors import SwarmError
from swarm.shardcast.have.claims import Claim
from swarm.shardcast.held import Held, Key, delta_key
from swarm.shardcast.rarity import bits_of
from swarm.shardcast.sources import Record, source_name
from swarm.shardcast.store import CheckpointStore
from swarm.transport import BlobReference, Source
from swarm.transport.http import limits as http_limits
from swarm.wire.messages import SOURCE_BYTES, Arrival, Checkpoint

SOURCES_SHOWN_MAX = 10_000

FETCHES_MAX = 16
"""Fetches of one checkpoint that are added up: deltas, and repetitions after a failure."""


def source_mark(name: str) -> bytes:
    """The short name of a source in a heartbeat."""
    return blake3(name.encode()).digest(length=SOURCE_BYTES)


@dataclass
class Arriving:
    """The newest checkpoint that was fetched, and who sent how much of it and of its deltas."""

    store: CheckpointStore
    _key: Key | None = None
    _received: deque[Counter[str]] = field(default_factory=lambda: deque(maxlen=FETCHES_MAX))
    """Bytes by source: of the checkpoint itself, and of each delta fetched for it."""

    def begin(self, job: "Job", *, is_delta: bool) -> None:
        """Note a fetch that begins; one of an older checkpoint leaves everything as it is."""
        if is_delta:
            self._received.append(job.bytes_by_source)
        elif self._key is None or job.key >= self._key:
            if job.key != self._key:
                self._received.clear()
            self._key = job.key
            self._received.append(job.bytes_by_source)

    def arrival(self) -> Arrival | None:
        """The state of that checkpoint now; None if none was fetched."""
        if self._key is None:
            return None
        received = sum(self._received, Counter[str]())
        total = received.total()
        source, most = max(received.items(), key=lambda each: (each[1], each[0]), default=("", 0))
        return Arrival(
            policy=self._key[1],
            held=int(1000 * self._held_share(self._key)),
            source=source_mark(source) if source else b"",
            source_share=1000 * most // total if total else 0,
            sources=min(len(received), SOURCES_SHOWN_MAX),
        )

    def _held_share(self, key: Key) -> float:
        """The share of the pieces on the disk; while a delta comes in its place, of the delta."""
        found = self.store.held(key)
        if found is not None and found.complete:
            return 1.0
        shares = [
            sum(held.pieces) / max(1, len(held.pieces))
            for held in (found, self.store.held(delta_key(key)))
            if held is not None
        ]
        return max(shares, default=0.0)


NOT_YET_SECONDS = 0.05
"""Pause after the answer "perhaps later", doubling up to `NOT_YET_SECONDS_MAX`."""

NOT_YET_SECONDS_MAX = 1.0

BUSY_SECONDS = 1.0
"""Pause after a source answered that it is busy, doubling up to `BUSY_SECONDS_MAX`; each pause is
half to all of this, at random. Its line is full, so asking soon gains nothing."""

BUSY_SECONDS_MAX = 16.0

BUSY_SHARE = 1 / 16
"""Both pauses are at most this part of the time since the fetch began (the first one at least
`BUSY_SECONDS`)."""

NEW_LANE_SECONDS = 2.0
"""Pause after a busy source before a fetch tries a further lane, doubling up to
`BUSY_SECONDS_MAX`; shorter while it has few."""

PARALLEL = 8
"""Pieces first requested at once: at 25 Mb/s each, the average uplink of an even swarm."""

PARALLEL_MAX = 32
"""Pieces that a peer requests at once when its neighbours are far ahead."""

PARALLEL_PER_SOURCE = 4
"""Pieces requested from one source at once: one arrives while the next request is in transit. Up to
half of `PARALLEL_MAX` if there are few sources and requests spend most of their time in transit."""

PIECE_DEADLINE_SECONDS = 10.0
"""Deadline of a piece, to which its transfer time is added."""

PIECE_BYTES_PER_SECOND_MIN = 2 * http_limits.BYTES_PER_SECOND_MIN
"""A source slower than this misses the deadline: twice the rate at which the source itself breaks
off, so that an honest client gives up first."""


def seconds_for(size_bytes: int) -> float:
    """Longest time that a request for so many bytes may take."""
    return PIECE_DEADLINE_SECONDS + size_bytes / PIECE_BYTES_PER_SECOND_MIN


Sources = Callable[[], Iterable[Source]]
"""Sources that may have the checkpoint, as of now; called again while the fetch runs."""

MANIFEST = -1
"""The manifest's index among the pieces."""


@dataclass
class Width:
    """Numbers of pieces that a fetch requests at once."""

    usual: int = PARALLEL
    most: int = PARALLEL_MAX
    per_source: int = PARALLEL_PER_SOURCE


@dataclass(eq=False)
class Line:
    """What a fetch remembers of one source."""

    source: Source
    claim: Claim | None = None
    """The pieces that it claims, if it announces any; kept up to date."""
    record: Record | None = None
    """What earlier requests have shown of it, as of the last look."""
    active: int = 0
    """Running requests to it."""
    not_before: float = 0.0
    pause: float = NOT_YET_SECONDS
    busy_pause: float = BUSY_SECONDS
    reason: str = "was not asked"
    faults: dict[int, str] = field(default_factory=dict)
    """Of a mirror: pieces that it lacks or has wrong, and how. It may have all others."""
    barred: int = 0
    """The same pieces, which this fetch does not request from it again: bit i is piece i."""

    def __post_init__(self) -> None:
        self.name = source_name(self.source)

    def bar(self, piece: int, reason: str) -> None:
        self.faults[piece] = reason
        self.barred |= 1 << piece

    def account(self) -> str:
        """Why this source has not sent everything, for an error message."""
        if not self.faults:
            return self.reason
        first, reason = min(self.faults.items())
        more = f", and of {len(self.faults) - 1} more" if len(self.faults) > 1 else ""
        return f"of piece {first}{more}: {reason}"


class Request:
    """One request to one source: usually for one piece, on a fast line for several."""

    __slots__ = ("attempts", "late", "line", "scope", "seconds", "size_bytes", "started")

    def __init__(self, line: Line, started: float, size_bytes: int) -> None:
        self.line = line
        self.started = started
        self.size_bytes = size_bytes
        self.attempts: list[Attempt] = []
        self.seconds = seconds_for(size_bytes)
        self.scope = trio.CancelScope(deadline=started + self.seconds)
        """Ends the request; most requests get that of their lane's last one."""
        self.late: Attempt | None = None
        """The attempt that was running when the request ended, if one was."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One piece requested from one source."""

    piece: int
    request: Request
    hedge_at: float
    """When the piece may be requested from another source as well."""
    spare: bool
    """Another attempt writes to the file, so this one writes to a spare file."""
    ended: trio.Event | None = None
    """Set at the attempt's end; created by a task that waits for it."""


class Job:
    def __init__(
        self,
        key: Key,
        checkpoint: Checkpoint,
        sources: Sources,
        started: float,
        folders: Collection[str] = (),
        plain: bool = False,
    ) -> None:
        self.key = key
        self.plain = plain
        self.folders = folders
        """The folders of which files are wanted; none: all files are."""
        self.caller_sources = sources
        self.digest = checkpoint.reference.digest
        self.manifest_bytes = checkpoint.reference.size_bytes
        self.total_bytes = checkpoint.total_bytes
        """Size of the checkpoint; 0 if unknown."""
        self.started = started
        self.found: Held | None = None
        """The checkpoint, once its manifest has arrived."""
        self.held: Held | None = None
        """The checkpoint, once its pieces may be requested."""
        self.missing = 0
        """Missing pieces without a running request: bit i is piece i."""
        self.attempts: dict[int, list[Attempt]] = {}
        self.landing: set[int] = set()
        """Pieces that arrived right and are being committed."""
        self.known: dict[str, Line] = {}
        """Sources as of the last look, by name."""
        self.lines: dict[str, Line] = {}
        """All sources that this fetch ever had."""
        self.look_at = 0.0
        """When to look for new sources."""
        self.active = 0
        self.width = 0
        """Number of requests that may run at once."""
        self.per_source = 0
        """Number of requests that may run at once to one source."""
        self.late = False
        """Whether more is missing here than at the neighbours."""
        self.more_at = 0.0
        """Sources were busy: no further lane starts before this time."""
        self.busy_pause = NEW_LANE_SECONDS
        self.spare_at = 0.0
        """The disk had no room for a spare file: none is created before this time."""
        self.pace = 0.0
        """Averaged bytes per second of one request, over all sources."""
        self.flowing = 1.0
        """Averaged part of a request's time in which bytes flow; the rest is the round trip."""
        self.bytes_by_source: Counter[str] = Counter()
        self.changed = trio.Event()
        self.scope = trio.CancelScope()
        self.error: SwarmError | None = None
        self.done = trio.Event()

    def want_missing(self, held: Held) -> None:
        """Allow requests for every wanted piece of the checkpoint that has not arrived."""
        self.held = held
        self.missing = bits_of(held.pieces) ^ ((1 << len(held.pieces)) - 1)
        if self.folders:
            self.missing = sum(1 << index for index in held.missing(self.folders))

    def reference(self, index: int) -> BlobReference:
        if index == MANIFEST:
            return BlobReference(self.digest, self.manifest_bytes)
        assert self.held is not None
        piece = self.held.manifest.pieces[index]
        return BlobReference(piece.digest, piece.size_bytes)

    def sources(self) -> Iterable[Source]:
        """The sources that the caller knows, and the mirrors that the manifest names."""
        mirrors = self.found.manifest.mirrors if self.found and not self.plain else ()
        return itertools.chain(
            self.caller_sources(), (Source(addresses=(mirror,)) for mirror in mirrors)
        )

    def is_here(self, index: int) -> bool:
        if index == MANIFEST:
            return self.found is not None
        return self.held is not None and bool(self.held.pieces[index])

    def end(self, attempt: Attempt) -> None:
        """Forget an attempt that has ended; if its piece has not arrived, it is missing again."""
        index = attempt.piece
        attempt.request.attempts.remove(attempt)
        if attempt.ended is not None:
            attempt.ended.set()
        attempts = self.attempts[index]
        attempts.remove(attempt)
        if not attempts:
            del self.attempts[index]
            if index != MANIFEST and not self.is_here(index):
                self.missing |= 1 << index

    def all_attempts(self) -> Iterator[Attempt]:
        return itertools.chain.from_iterable(self.attempts.values())

    def waiting_for(self) -> str:
        """The sources that this fetch waits for, and why, for the error that ends it."""
        if not self.lines:
            return "no source is known"
        some = [f"{name}: {line.account()}" for name, line in sorted(self.lines.items())]
        return "; ".join(some[:5]) + (f"; and {len(some) - 5} more" if len(some) > 5 else "")
