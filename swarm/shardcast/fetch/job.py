"""The state of one running fetch: its sources, its requests under way, and what is missing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import trio

from swarm.errors import SwarmError
from swarm.messages import Checkpoint
from swarm.shardcast.have.claims import Claim
from swarm.shardcast.held import Held, Key
from swarm.shardcast.sources import source_name
from swarm.transport import BlobReference, Source
from swarm.transport.http import limits as http_limits

MIRROR_PIECE_SECONDS = 1.0
"""Pause before a mirror is asked again for a piece that it lacks or has wrong, doubling."""

MIRROR_PIECE_SECONDS_MAX = 30.0

MIRROR_PIECE_ATTEMPTS = 4
"""Failed requests, over seven seconds, after which a fetch from mirrors alone gives a piece up."""

NOT_YET_SECONDS = 0.05
"""Pause after a source said that it may have a piece later, doubling up to the next number."""

NOT_YET_SECONDS_MAX = 1.0

BUSY_SECONDS = 1.0
"""Pause after a source said that it is busy, doubling up to the next number, each half to whole by
chance. Its line is full, so asking again soon would gain nothing."""

BUSY_SECONDS_MAX = 16.0

NEW_LANE_SECONDS = 2.0
"""Pause after a busy source before a fetch tries a further lane, doubling up to
`BUSY_SECONDS_MAX`; shorter while it has few."""

PARALLEL = 8
"""Pieces one peer asks for at once to begin with: at 25 Mb/s each, the average uplink of a swarm
that shares evenly."""

PARALLEL_MAX = 32
"""Pieces a peer asks for at once when its neighbours are far ahead."""

PARALLEL_PER_SOURCE = 4
"""Pieces asked of one source at once: one arrives while the next request travels. Up to half of
`PARALLEL_MAX` where there are few sources and requests are on their way most of the time."""

PIECE_DEADLINE_SECONDS = 10.0
"""A piece's deadline without its transfer time."""

PIECE_BYTES_PER_SECOND_MIN = 2 * http_limits.BYTES_PER_SECOND_MIN
"""A source slower than this misses the deadline: twice the rate at which the source itself breaks
off, so that an honest client gives up first."""

Sources = Callable[[], Iterable[Source]]
"""Sources that may have the checkpoint, as of now; called again while the fetch runs."""

MANIFEST = -1
"""The manifest's index among the pieces."""


@dataclass
class Width:
    """How many pieces a fetch asks for at once."""

    usual: int = PARALLEL
    most: int = PARALLEL_MAX
    per_source: int = PARALLEL_PER_SOURCE


class Line:
    """What a fetch remembers of one source."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.name = source_name(source)
        self.claim: Claim | None = None
        """The pieces it claims, if it announces any; kept up to date."""
        self.active = 0
        """Pieces asked of it at the moment."""
        self.not_before = 0.0
        self.pause = NOT_YET_SECONDS
        self.busy_pause = BUSY_SECONDS
        self.reason = "was not asked"
        self.faults: dict[int, Fault] = {}
        """Of a mirror: pieces that it lacks or has wrong. It may have all others."""
        self.barred = 0
        """Of those, the pieces not to ask for now: bit i is piece i."""
        self.hopeless = 0
        """Pieces that were asked for too often in vain."""

    def bar(self, piece: int, reason: str, now: float) -> None:
        """Ask for a piece again only after a while."""
        fault = self.faults.setdefault(piece, Fault())
        fault.reason = reason
        fault.until = now + min(MIRROR_PIECE_SECONDS * 2.0**fault.times, MIRROR_PIECE_SECONDS_MAX)
        fault.times += 1
        self.barred |= 1 << piece
        if fault.times >= MIRROR_PIECE_ATTEMPTS:
            self.hopeless |= 1 << piece

    def account(self) -> str:
        """Why this source has not sent everything, for an error."""
        pieces = sorted(piece for piece in self.faults if self.barred >> piece & 1)
        if not pieces:
            return self.reason
        more = f", and of {len(pieces) - 1} more" if len(pieces) > 1 else ""
        return f"of piece {pieces[0]}{more}: {self.faults[pieces[0]].reason}"

    def look_again(self, now: float) -> None:
        """Allow pieces to be asked for again whose pause is over."""
        for piece, fault in self.faults.items():
            if fault.until <= now:
                self.barred &= ~(1 << piece)


@dataclass
class Fault:
    """What is wrong with one piece at one mirror."""

    reason: str = ""
    times: int = 0
    until: float = 0.0


class Request:
    """One request to one source: most often for one piece, on a fast line for several."""

    __slots__ = ("attempts", "line", "scope", "seconds", "size_bytes", "started")

    def __init__(self, line: Line, started: float, size_bytes: int) -> None:
        self.line = line
        self.started = started
        self.size_bytes = size_bytes
        self.attempts: list[Attempt] = []
        self.seconds = PIECE_DEADLINE_SECONDS
        self.seconds += size_bytes / PIECE_BYTES_PER_SECOND_MIN
        """How long it may take."""
        self.scope = trio.CancelScope(deadline=started + self.seconds)


class Attempt:
    """One piece asked of one source."""

    __slots__ = ("ended", "hedge_at", "piece", "request", "spare")

    def __init__(self, piece: int, request: Request, hedge_at: float, spare: bool):
        self.piece = piece
        self.request = request
        self.hedge_at = hedge_at
        """When the piece may be asked of another source as well."""
        self.spare = spare
        """Another attempt writes to the file, so this one writes to a spare file."""
        self.ended: trio.Event | None = None
        """Created by a task that waits for the end."""


class Job:
    """One running fetch."""

    def __init__(self, key: Key, checkpoint: Checkpoint, sources: Sources, started: float) -> None:
        self.key = key
        self.caller_sources = sources
        self.digest = checkpoint.manifest_digest
        self.manifest_bytes = checkpoint.manifest_bytes
        self.total_bytes = checkpoint.total_bytes
        """0 where that is not known."""
        self.started = started
        self.found: Held | None = None
        """Once its manifest is here."""
        self.held: Held | None = None
        """Once its pieces are wanted."""
        self.missing = 0
        """Pieces that no source is asked for: bit i is piece i."""
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
        """How many pieces may be asked for at once."""
        self.per_source = 0
        """How many of one source."""
        self.late = False
        """Whether more is missing here than at the neighbours."""
        self.more_at = 0.0
        """Sources were busy: until then no further lane is tried."""
        self.busy_pause = NEW_LANE_SECONDS
        self.spare_at = 0.0
        """There was no room for a spare file: until then none is asked for."""
        self.pace = 0.0
        """Averaged bytes a second of one request, over all sources."""
        self.flowing = 1.0
        """Averaged part of a request's time in which bytes flow; the rest is its way and back."""
        self.bytes_by_source: Counter[str] = Counter()
        self.changed = trio.Event()
        self.scope = trio.CancelScope()
        self.error: SwarmError | None = None
        self.done = trio.Event()

    def reference(self, index: int) -> BlobReference:
        if index == MANIFEST:
            return BlobReference(self.digest, self.manifest_bytes)
        assert self.held is not None
        piece = self.held.manifest.pieces[index]
        return BlobReference(piece.digest, piece.size_bytes)

    def sources(self) -> Iterable[Source]:
        """The sources that the caller knows, and the mirrors that the manifest names."""
        mirrors = self.found.manifest.mirrors if self.found is not None else ()
        return itertools.chain(
            self.caller_sources(), (Source(addresses=(mirror,)) for mirror in mirrors)
        )

    def is_here(self, index: int) -> bool:
        """Whether a piece, or the manifest, needs no source any more."""
        if index == MANIFEST:
            return self.found is not None
        return self.held is not None and bool(self.held.pieces[index])

    def end(self, attempt: Attempt) -> None:
        """Forget an attempt that is over; a piece that is not here is missing again."""
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
        """Which sources this fetch waits for and why, for the error that ends it."""
        if not self.lines:
            return "no source is known"
        some = [f"{name}: {line.account()}" for name, line in sorted(self.lines.items())]
        more = f"; and {len(some) - 5} more" if len(some) > 5 else ""
        return "; ".join(some[:5]) + more
