"""From an announcement to a complete folder: pieces from several sources at once.

A fetch has a number of lanes. Each asks one source for one piece after the other: the rarest that
the source claims and that nobody was asked for; on a fast line, with some that follow it. A lane
stays with its source while that has more and is not slow, so that every uplink keeps its readers;
else it takes another one, sampled from the book. The manifest is fetched like a piece. When every
piece is asked for and lanes are free, the slowest ones are asked of further sources too; the first
right answer wins and the others are cancelled. Nothing that was committed is ever
fetched again, also after a restart.
"""

from __future__ import annotations

import errno
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import trio

from swarm import defaults
from swarm.errors import DeadlineError, DiskFullError, SwarmError
from swarm.events import Events
from swarm.identity import PeerId
from swarm.messages import Checkpoint
from swarm.shardcast.chain import Deltas
from swarm.shardcast.have import Claim, HaveExchange
from swarm.shardcast.manifest import BadManifest
from swarm.shardcast.rarity import bits_of, draw
from swarm.shardcast.sources import SourceBook, source_name
from swarm.shardcast.store import CheckpointConflict, CheckpointStore, Held, Key, delta_key
from swarm.transport import BlobReference, BlobTransport, FetchError, Source
from swarm.world import Piece, Sink, World

_T = TypeVar("_T")

Sources = Callable[[], Iterable[Source]]
"""Who may have the checkpoint, as of now; asked again while the fetch goes on."""

_MANIFEST = -1
"""The manifest's number among the pieces."""


class _Line:
    """What a fetch remembers of one source."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.name = source_name(source)
        self.claim: Claim | None = None
        """What it says to have, if it says anything; kept up to date."""
        self.active = 0
        """Pieces asked of it at the moment."""
        self.not_before = 0.0
        self.pause = defaults.NOT_YET_SECONDS
        self.busy_pause = defaults.BUSY_SECONDS
        self.reason = "was not asked"
        self.faults: dict[int, _Fault] = {}
        """Of a mirror: pieces that it has not, or has wrong. It may have all others."""
        self.barred = 0
        """Of those, the ones not to be asked for now: bit i is piece i."""
        self.hopeless = 0
        """Those that were asked for in vain again and again."""

    def bar(self, piece: int, reason: str, now: float) -> None:
        """Ask for a piece again only after a while."""
        fault = self.faults.setdefault(piece, _Fault())
        fault.reason = reason
        fault.until = now + min(
            defaults.MIRROR_PIECE_SECONDS * 2.0**fault.times, defaults.MIRROR_PIECE_SECONDS_MAX
        )
        fault.times += 1
        self.barred |= 1 << piece
        if fault.times >= defaults.MIRROR_PIECE_ATTEMPTS:
            self.hopeless |= 1 << piece

    def account(self) -> str:
        """What is to be said of this source, should the fetch end now."""
        pieces = sorted(piece for piece in self.faults if self.barred >> piece & 1)
        if not pieces:
            return self.reason
        more = f", and of {len(pieces) - 1} more" if len(pieces) > 1 else ""
        return f"of piece {pieces[0]}{more}: {self.faults[pieces[0]].reason}"

    def look_again(self, now: float) -> None:
        """Some of what it lacked may be there now."""
        for piece, fault in self.faults.items():
            if fault.until <= now:
                self.barred &= ~(1 << piece)


@dataclass
class _Fault:
    """What is wrong with one piece at one mirror."""

    reason: str = ""
    times: int = 0
    until: float = 0.0


class _Run:
    """One request to one source: most often for one piece, on a fast line for several."""

    __slots__ = ("attempts", "line", "scope", "seconds", "size_bytes", "started")

    def __init__(self, line: _Line, started: float, size_bytes: int) -> None:
        self.line = line
        self.started = started
        self.size_bytes = size_bytes
        self.attempts: list[_Attempt] = []
        self.seconds = defaults.PIECE_DEADLINE_SECONDS
        self.seconds += size_bytes / defaults.PIECE_BYTES_PER_SECOND_MIN
        """How long it may take."""
        self.scope = trio.CancelScope(deadline=started + self.seconds)


class _Attempt:
    """One piece asked of one source."""

    __slots__ = ("ended", "hedge_at", "piece", "run", "spare")

    def __init__(self, piece: int, run: _Run, hedge_at: float, spare: bool):
        self.piece = piece
        self.run = run
        self.hedge_at = hedge_at
        """From when on the piece may be asked of another source as well."""
        self.spare = spare
        """Another attempt writes to the piece's place, so this one writes to a spare file."""
        self.ended: trio.Event | None = None
        """Made by whoever waits for the end."""


class _WrongBytes(Exception):
    """A piece of a run was wrong: nothing more is taken from it."""


class _Job:
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
        """Pieces that nobody is asked for: bit i is piece i."""
        self.attempts: dict[int, list[_Attempt]] = {}
        self.landing: set[int] = set()
        """Pieces that arrived right and are being committed."""
        self.known: dict[str, _Line] = {}
        """Sources as of the last look, by name."""
        self.lines: dict[str, _Line] = {}
        """All sources there ever were."""
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
        self.busy_pause = defaults.FETCH_BUSY_SECONDS
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
        if index == _MANIFEST:
            return BlobReference(self.digest, self.manifest_bytes)
        assert self.held is not None
        piece = self.held.manifest.pieces[index]
        return BlobReference(piece.digest, piece.size_bytes)

    def sources(self) -> Iterable[Source]:
        """Those that the caller knows, and the mirrors that the manifest names."""
        mirrors = self.found.manifest.mirrors if self.found is not None else ()
        return itertools.chain(
            self.caller_sources(), (Source(addresses=(mirror,)) for mirror in mirrors)
        )

    def all_attempts(self) -> Iterator[_Attempt]:
        return itertools.chain.from_iterable(self.attempts.values())

    def waiting_for(self) -> str:
        """Whom this fetch waits for and why, for the error that ends it."""
        if not self.lines:
            return "no source is known"
        some = [f"{name}: {line.account()}" for name, line in sorted(self.lines.items())]
        more = f"; and {len(some) - 5} more" if len(some) > 5 else ""
        return "; ".join(some[:5]) + more


class Fetcher:
    """Fetches checkpoints into a store. One a peer; fetches of several may run at once."""

    def __init__(
        self,
        world: World,
        transport: BlobTransport,
        store: CheckpointStore,
        events: Events,
        *,
        have: HaveExchange | None = None,
        book: SourceBook | None = None,
        deltas: Deltas | None = None,
        parallel: int = defaults.FETCH_PARALLEL,
        parallel_max: int = defaults.FETCH_PARALLEL_MAX,
        parallel_per_source: int = defaults.FETCH_PARALLEL_PER_SOURCE,
    ) -> None:
        self._world = world
        self._transport = transport
        self._store = store
        self._events = events
        self._have = have
        self._deltas = deltas
        self.book = book if book is not None else SourceBook(world)
        self._parallel = parallel
        self._parallel_max = parallel_max
        self._parallel_per_source = parallel_per_source
        self._jobs: dict[Key, _Job] = {}
        if have is not None:
            have.on_change(self._claims_changed)

    def _claims_changed(self, peer: PeerId) -> None:
        assert self._have is not None
        for job in self._jobs.values():
            line = job.lines.get(peer)
            if line is None:
                job.look_at = 0.0
            else:
                claim = self._have.claim(peer, job.digest)
                if claim is not line.claim:
                    line.claim = claim
                    line.not_before = 0.0
            self._widen(job)
            if job.active < job.width and job.more_at <= self._world.now():
                job.changed.set()

    async def fetch(
        self,
        checkpoint: Checkpoint,
        sources: Sources,
        *,
        deadline_seconds: float = defaults.CHECKPOINT_DEADLINE_SECONDS,
        is_delta: bool = False,
    ) -> str:
        """The folder of a complete checkpoint on this peer's disk, fetched if it is not there: by
        deltas where an older one is here and its manifest names a short chain from that.

        The announcement must have been believed already; everything fetched is checked against
        it. A second fetch of the same checkpoint waits for the first.

        Cancelled or failed, it keeps what it has and goes on there next time. Raises
        `DeadlineError` naming the sources and what was wrong with each, `DiskFullError`,
        `BadManifest`, `CheckpointConflict`.
        """
        key: Key = (checkpoint.lineage, checkpoint.step)
        if is_delta:
            key = delta_key(key)
        started = self._world.now()
        waiting_for = "another fetch of it"
        try:
            with trio.fail_after(deadline_seconds):
                while (running := self._jobs.get(key)) is not None:
                    await running.done.wait()
                job = self._jobs[key] = _Job(key, checkpoint, sources, started)
                self._store.pin(key)
                try:
                    folder = await self._already(key, checkpoint)
                    return folder if folder is not None else await self._run(job)
                finally:
                    waiting_for = job.waiting_for()
                    self._store.unpin(key)
                    del self._jobs[key]
                    self._tell_lateness()
                    job.done.set()
        except trio.TooSlowError as error:
            raise DeadlineError(
                f"{'the delta to ' if is_delta else ''}checkpoint {key[0]}/{key[1]} was not "
                f"fetched within {deadline_seconds:g} s ({waiting_for})"
            ) from error

    async def _already(self, key: Key, checkpoint: Checkpoint) -> str | None:
        """The folder if the checkpoint is complete here; discards a partial one of another
        manifest."""
        held = self._store.held(key)
        if held is None:
            return None
        if held.digest != checkpoint.manifest_digest:
            if held.complete:
                raise CheckpointConflict(
                    f"checkpoint {key[0]}/{key[1]} is here already with another manifest "
                    f"({held.digest.hex()[:12]}) than was announced "
                    f"({checkpoint.manifest_digest.hex()[:12]})"
                )
            await self._store.discard(key)
            return None
        return held.folder if held.complete else None

    async def _run(self, job: _Job) -> str:
        with job.scope:
            job.found = self._store.held(job.key)
            if job.found is None:
                async with trio.open_nursery() as nursery:
                    await self._hand_out(job, nursery)
                assert job.found is not None
            await self._begin(job, job.found)
            async with trio.open_nursery() as nursery:
                await self._hand_out(job, nursery)
        if job.error is not None:
            raise job.error
        assert job.held is not None
        folder = await self._store.finish(job.held)
        self._events.emit(
            "shardcast.checkpoint_complete",
            lineage=job.key[0],
            step=job.key[1],
            seconds=self._world.now() - job.started,
            bytes=job.held.manifest.total_bytes,
            delta=job.held.is_delta,
            bytes_fetched=sum(job.bytes_by_source.values()),
            by_source=dict(sorted(job.bytes_by_source.items())),
        )
        return folder

    async def _begin(self, job: _Job, held: Held) -> None:
        """Take what can be had without a network, and want the missing pieces. That may take long,
        so no request waits for it."""
        await self._store.copy_known(held)
        if self._deltas is not None and not held.is_delta:
            await self._deltas.fill(held, functools.partial(self._fetch_delta, job))
        job.held = held
        self._want_missing(job, held)

    @staticmethod
    def _want_missing(job: _Job, held: Held) -> None:
        job.missing = bits_of(held.pieces) ^ ((1 << len(held.pieces)) - 1)

    async def _are_files_right(self, job: _Job, held: Held) -> bool:
        """Whether a fetch is over once every piece is here. Pieces prove themselves; for what came
        by deltas the files' SHA-256 is checked too, and what the disk lost meanwhile wanted again.
        """
        if not held.from_deltas:
            return True
        try:
            await self._store.check_files(held)
        except BadManifest as error:
            job.error = error
            return True
        self._want_missing(job, held)
        job.changed.set()
        return not job.missing

    async def _fetch_delta(self, job: _Job, delta: Checkpoint, deadline_seconds: float) -> str:
        return await self.fetch(
            delta, job.sources, deadline_seconds=deadline_seconds, is_delta=True
        )

    # --- handing out work --------------------------------------------------------------------

    async def _hand_out(self, job: _Job, nursery: trio.Nursery) -> None:
        """Start lanes until the manifest is here, or then until nothing is missing and nothing
        under way."""
        job.width = self._parallel
        job.per_source = self._parallel_per_source
        while True:
            job.changed = trio.Event()
            wake_at = self._assign(job, nursery)
            self._end_if_hopeless(job)
            if job.held is None and job.found is not None:
                return
            under_way = job.missing or job.attempts or job.landing
            if job.held and not under_way and await self._are_files_right(job, job.held):
                return
            with trio.move_on_at(wake_at):
                await job.changed.wait()

    def _end_if_hopeless(self, job: _Job) -> None:
        """End a fetch from mirrors alone, once all that they have is here and the rest was asked
        of each again and again: among peers somebody may still bring it."""
        if self._have is not None or not job.missing or job.attempts or job.landing:
            return
        lines = [line for _, line in sorted(job.known.items())]
        if not lines or any(job.missing & ~line.hopeless for line in lines):
            return
        assert job.held is not None
        count = job.missing.bit_count()
        first = (job.missing & -job.missing).bit_length() - 1
        piece = job.held.manifest.pieces[first]
        why = "; ".join(f"{line.name}: {line.faults[first].reason}" for line in lines)
        job.error = FetchError(
            f"no mirror has {count} of the {len(job.held.pieces)} pieces of checkpoint "
            f"{job.key[0]}/{job.key[1]}; the first is piece {first}, of "
            f"{job.held.manifest.files[piece.file].name}, blob/{piece.digest.hex()} ({why}). What "
            "is here is kept: mend the mirror or name another one, and fetch again"
        )
        job.scope.cancel()

    def _assign(self, job: _Job, nursery: trio.Nursery) -> float:
        """Give every free lane a piece; returns when to look again if nothing changes."""
        now = self._world.now()
        overdue = sum(attempt.hedge_at <= now for attempt in job.all_attempts())
        if job.look_at <= now or (overdue and not job.missing):
            job.look_at = now + defaults.SOURCES_RECHECK_SECONDS
            self._look(job)
        # Lanes held by sources that are overdue are lent out again, else a few that trickle or
        # hang could hold all of them until their deadlines.
        lanes = job.width + min(overdue, self._parallel_max)
        while job.active < lanes and job.more_at <= now:
            run = self._next(job, None, now) or self._hedge(job, now)
            if run is None:
                break
            nursery.start_soon(self._lane, job, run)
        due = (attempt.hedge_at for attempt in job.all_attempts() if attempt.hedge_at > now)
        wake_at = min(due, default=inf)
        if job.active < lanes:
            if job.more_at > now:
                return min(wake_at, job.more_at)
            wake_at = min(wake_at, job.look_at)
            for line in job.known.values():
                ready_at = max(line.not_before, self.book.paused_until(line.name))
                if now < ready_at < wake_at:
                    wake_at = ready_at
        return max(wake_at, now + defaults.FETCH_LOOK_SECONDS_MIN)

    def _look(self, job: _Job) -> None:
        """Ask the caller who may have the checkpoint."""
        known = {}
        for source in job.sources():
            if source.peer == self._transport.peer_id:
                continue
            name = source_name(source)
            line = job.lines.get(name)
            if line is None:
                line = job.lines[name] = _Line(source)
                if self._have is not None and source.peer is not None:
                    line.claim = self._have.claim(source.peer, job.digest)
            line.source = source
            line.look_again(self._world.now())
            known[name] = line
        job.known = known
        self._widen(job)

    def _widen(self, job: _Job) -> None:
        """How much to ask for at once: as much more than usual as more is missing here than at
        the neighbours. Who is late catches up, who is ahead leaves room, and all finish nearly
        together, so that no uplink falls idle early for want of somebody to send to."""
        if job.held is None:
            return
        pieces = len(job.held.pieces)
        claims = [line.claim for line in job.known.values() if line.claim is not None]
        usual = self._usual_width(job)
        job.per_source = self._parallel_per_source
        if usual > self._parallel and job.known:
            # Too few sources for so many: each is asked for more.
            share = min(-(-usual // len(job.known)), self._parallel_max // 2)
            job.per_source = max(job.per_source, share)
        if not claims:
            job.width, job.late = usual, False
            self._tell_lateness()
            return
        theirs = sum(claim.lacks(pieces) for claim in claims) / len(claims)
        # What they claim is some time ago: they lack less by now.
        missing = job.missing.bit_count()
        late = missing / max(0.9 * theirs, 1.0)
        job.late = late >= defaults.FETCH_LATE
        self._tell_lateness()
        # Towards the end, when that says little, there is room: others have finished.
        ending = missing <= pieces * defaults.FETCH_ENDING_SHARE
        least = min(2 * usual, self._parallel_max) if ending else max(1, 7 * usual // 8)
        job.width = max(least, min(round(usual * late * late), self._parallel_max))

    def _tell_lateness(self) -> None:
        if self._have is not None:
            self._have.late = any(job.late for job in self._jobs.values())

    def _usual_width(self, job: _Job) -> int:
        """As many that about `FETCH_PARALLEL` pieces flow at once, the others' requests being on
        their way: small pieces on long and fast lines are here as soon as they were asked for."""
        wanted = int(defaults.FETCH_FLOWING_SHARE * self._parallel / max(job.flowing, 0.01))
        return max(self._parallel, min(wanted, self._parallel_max))

    def _next(self, job: _Job, last: _Line | None, now: float) -> _Run | None:
        """What nobody is asked for, and whom to ask: the last one again if possible."""
        if job.held is None:
            return self._next_manifest(job, now)
        if not job.missing or job.scope.cancel_called:
            return None
        stays = last is not None and self._stays(job, last)
        able = self._offer(job, last, now) if last is not None and stays else 0
        if last is not None and able:
            line = last
        else:
            offers = [(line, self._offer(job, line, now)) for line in job.known.values()]
            offers = [entry for entry in offers if entry[1]]
            if not offers:
                return None
            # Whoever says to have something comes before whoever says nothing.
            offers = [entry for entry in offers if entry[0].claim is not None] or offers
            line, able = self._choose(offers)
        if self._have is not None:
            index = draw(self._have.rarest(job.digest, able), self._world.random)
        else:
            # In order from mirrors: where nobody else follows, a file's hash keeps up with its
            # pieces.
            index = (able & -able).bit_length() - 1
        count = self._count(job, index, line)
        indices = [index]
        while len(indices) < count and able >> (indices[-1] + 1) & 1:
            indices.append(indices[-1] + 1)
        for each in indices:
            job.missing ^= 1 << each
        return self._ask_for(job, indices, line, now)

    def _count(self, job: _Job, index: int, line: _Line) -> int:
        """How many pieces to ask for at once, if they follow each other."""
        in_time = self.book.bandwidth(line.name) * defaults.FETCH_RUN_SECONDS
        pieces = int(in_time / job.reference(index).size_bytes)
        if pieces < 2:
            return 1
        # Towards the end every lane gets its part.
        left = (job.missing.bit_count() + 2) // (2 * self._parallel_per_source)
        return max(1, min(pieces, left, defaults.FETCH_RUN_PIECES_MAX))

    def _stays(self, job: _Job, line: _Line) -> bool:
        """Whether a lane asks its source again."""
        return (
            line.claim is not None
            and self._world.random.random() >= defaults.FETCH_LEAVE_SHARE
            and 2.0 * self.book.bandwidth(line.name) >= job.pace
        )

    def _choose(self, lines: Sequence[tuple[_Line, _T]]) -> tuple[_Line, _T]:
        return lines[self.book.choose([line.name for line, _ in lines])]

    def _next_manifest(self, job: _Job, now: float) -> _Run | None:
        if job.found is not None or _MANIFEST in job.attempts or _MANIFEST in job.landing:
            return None
        lines = [
            (line, 1) for line in job.known.values() if self._may_have(job, line, _MANIFEST, now)
        ]
        if not lines:
            return None
        line, _ = self._choose([entry for entry in lines if entry[0].claim is not None] or lines)
        return self._ask_for(job, [_MANIFEST], line, now)

    def _is_able(self, job: _Job, line: _Line, now: float) -> bool:
        """Whether a source can be asked for one more piece now."""
        return (
            line.active < job.per_source
            and line.not_before <= now
            and not self.book.is_paused(line.name, now)
        )

    def _offer(self, job: _Job, line: _Line, now: float) -> int:
        """Pieces that nobody is asked for, and that a source may have and can be asked for now."""
        if not self._is_able(job, line, now):
            return 0
        if line.claim is not None:
            return line.claim.of(job.missing)
        return job.missing & ~line.barred if self._is_asked_blindly(job, line, now) else 0

    def _may_have(self, job: _Job, line: _Line, index: int, now: float) -> bool:
        if not self._is_able(job, line, now):
            return False
        if line.claim is not None:
            return index == _MANIFEST or line.claim.has(index)
        if index != _MANIFEST and line.barred >> index & 1:
            return False
        return self._is_asked_blindly(job, line, now)

    def _is_asked_blindly(self, job: _Job, line: _Line, now: float) -> bool:
        """Whether a source is asked for what it does not claim."""
        if self._have is None or line.source.peer is None:
            return True
        # A neighbour that never spoke of this checkpoint will do so once it has some of it; asked
        # all the same after a while, since it may have forgotten to.
        waited = now - job.started
        return not self._have.speaks(line.source.peer) or waited >= defaults.HAVE_SILENCE_SECONDS

    def _hedge(self, job: _Job, now: float) -> _Run | None:
        """One of the last pieces, asked of a further source since it takes too long."""
        if job.missing or job.spare_at > now:
            return None
        for index, attempts in job.attempts.items():
            # One more only when every copy under way is late: liars that hang cannot use up the
            # copies, and an honest source is left its time.
            if index in job.landing or max(attempt.hedge_at for attempt in attempts) > now:
                continue
            asked = {attempt.run.line.name for attempt in attempts}
            lines = [
                (line, 1)
                for line in job.known.values()
                if line.name not in asked and self._may_have(job, line, index, now)
            ]
            if lines and job.active < 2 * self._parallel_max:
                return self._ask_for(job, [index], self._choose(lines)[0], now)
        return None

    def _ask_for(self, job: _Job, indices: list[int], line: _Line, now: float) -> _Run:
        sizes = [job.reference(index).size_bytes for index in indices]
        run = _Run(line, now, sum(sizes))
        bandwidth = self.book.bandwidth(line.name)
        expected = 0.0
        for index, size_bytes in zip(indices, sizes, strict=True):
            expected += size_bytes / bandwidth
            hedge_at = now + max(2 * expected, defaults.FETCH_HEDGE_SECONDS)
            attempts = job.attempts.get(index)
            if attempts is None:
                attempts = job.attempts[index] = []
            attempt = _Attempt(index, run, hedge_at, spare=bool(attempts))
            attempts.append(attempt)
            run.attempts.append(attempt)
        line.active += 1
        job.active += 1
        return run

    # --- one request to one source -----------------------------------------------------------

    async def _lane(self, job: _Job, run: _Run | None) -> None:
        """One request after the other, until there is nothing to ask for."""
        while run is not None:
            await self._request(job, run)
            now = self._world.now()
            free = job.active < job.width
            run = self._next(job, run.line, now) if free else None
            wanting = run is None or job.active < job.width
            if (wanting and job.more_at <= now) or not job.active:
                job.changed.set()

    async def _request(self, job: _Job, run: _Run) -> None:
        line = run.line
        try:
            with run.scope:
                await self._ask(job, run)
            if run.scope.cancelled_caught:
                now = self._world.now()
                seconds = now - run.started
                # If another source was first, this one can at best have been this fast.
                self.book.given_up(line.name, run.size_bytes, seconds)
                late = run.attempts[0]
                if seconds >= run.seconds:
                    line.reason = f"did not send a piece within {run.seconds:.0f} s"
                    self.book.failed(line.name)
                    self._refused(job, late.piece, line)
                elif late.hedge_at <= now:
                    line.reason = f"had not sent a piece after {seconds:.1f} s, and another had"
                    self._passed_over(job, late.piece, line)
        except (DiskFullError, BadManifest) as error:
            if isinstance(error, DiskFullError) and run.attempts[0].spare:
                # Only a second way to a piece that is on its way already.
                job.spare_at = self._world.now() + defaults.SOURCES_RECHECK_SECONDS
            else:
                job.error = error
                job.scope.cancel()
        finally:
            job.active -= 1
            line.active -= 1
            while run.attempts:
                self._end(job, run.attempts[0])

    def _end(self, job: _Job, attempt: _Attempt) -> None:
        """An attempt is over; its piece, if it is not here, is wanted again."""
        index = attempt.piece
        attempt.run.attempts.remove(attempt)
        if attempt.ended is not None:
            attempt.ended.set()
        attempts = job.attempts[index]
        attempts.remove(attempt)
        if not attempts:
            del job.attempts[index]
            if index != _MANIFEST and not self._is_here(job, index):
                job.missing |= 1 << index

    @staticmethod
    def _is_here(job: _Job, index: int) -> bool:
        if index == _MANIFEST:
            return job.found is not None
        return job.held is not None and bool(job.held.pieces[index])

    async def _sink(self, job: _Job, index: int) -> Sink:
        """The place of a piece. At most one attempt at a time may write to it."""
        if index == _MANIFEST:
            return await self._store.manifest_sink(job.key, job.manifest_bytes)
        assert job.held is not None
        return self._store.sink(job.held, index)

    async def _ask(self, job: _Job, run: _Run) -> None:
        index = run.attempts[0].piece
        if not run.attempts[0].spare:
            sinks = [await self._sink(job, attempt.piece) for attempt in run.attempts]
            await self._receive(job, run, sinks, None)
            return
        size = job.reference(index).size_bytes
        async with self._store.spare_file(size) as path:
            sink = self._store.disk.sink(path, 0, size)
            await self._receive(job, run, [sink], path)

    async def _receive(self, job: _Job, run: _Run, sinks: list[Sink], spare: str | None) -> None:
        """Fetch the pieces of a run into `sinks` (the only one: of the file `spare`, if given),
        check and place each."""
        line = run.line
        try:
            if len(sinks) == 1:
                reference = job.reference(run.attempts[0].piece)
                piece = await self._transport.fetch(line.source, reference, sinks[0])
                seconds = self._world.now() - run.started
                await self._arrived(job, run.attempts[0], sinks[0], piece, seconds, spare)
            else:
                await self._receive_several(job, run, sinks)
        except FetchError as error:
            line.reason = str(error)
            now = self._world.now()
            index = run.attempts[0].piece
            if error.busy:
                self._rest(job, line, now)
            elif error.lacks and line.source.peer is None and index != _MANIFEST:
                line.bar(index, str(error), now)
                self._refused(job, index, line)
            elif error.retry and (line.claim is None or not line.claim.has(index)):
                line.not_before = now + line.pause
                if line.pause < defaults.NOT_YET_SECONDS_MAX <= 2 * line.pause:
                    self._passed_over(job, index, line)
                line.pause = min(2 * line.pause, defaults.NOT_YET_SECONDS_MAX)
            else:
                self.book.failed(line.name)
                self._refused(job, index, line)
        finally:
            for sink in sinks:
                sink.abandon()

    async def _receive_several(self, job: _Job, run: _Run, sinks: list[Sink]) -> None:
        wanted = [
            (job.reference(attempt.piece), sink)
            for attempt, sink in zip(run.attempts, sinks, strict=True)
        ]
        left = iter(sinks)
        count = 0

        async def arrived(piece: Piece) -> None:
            nonlocal count
            count += 1
            # Those that follow arrive while the first is checked: only their average says much.
            seconds = (self._world.now() - run.started) / count
            attempt = run.attempts[0]
            if not await self._arrived(job, attempt, next(left), piece, seconds, None):
                raise _WrongBytes
            self._end(job, attempt)

        try:
            await self._transport.fetch_run(run.line.source, wanted, arrived)
        except _WrongBytes:
            return  # said already

    async def _arrived(
        self,
        job: _Job,
        attempt: _Attempt,
        sink: Sink,
        piece: Piece,
        seconds: float,
        spare: str | None,
    ) -> bool:
        """Check and place a piece that took so long; False if it was wrong."""
        index, line = attempt.piece, attempt.run.line
        reference = job.reference(index)
        if index in job.landing or self._is_here(job, index):
            return True
        if piece.size_bytes != reference.size_bytes or not piece.verify(reference.digest):
            line.reason = "sent wrong bytes"
            if line.source.peer is None and index != _MANIFEST:
                # Nobody lies here: a file of a web server is damaged, the others need not be.
                line.bar(index, line.reason, self._world.now())
                self.book.failed(line.name)
            else:
                self.book.corrupt(line.name)
            self._refused(job, index, line)
            return False
        job.landing.add(index)
        others = [other for other in job.attempts[index] if other is not attempt]
        for other in others:
            other.run.scope.cancel()
        try:
            await sink.commit(piece)
            if spare is not None:
                for other in others:
                    if other in job.attempts[index]:
                        other.ended = trio.Event()
                        await other.ended.wait()
                await self._copy_in(job, index, spare)
            await self._landed(job, index)
        finally:
            job.landing.discard(index)
        self.book.succeeded(line.name, reference.size_bytes, seconds)
        pace = reference.size_bytes / max(seconds, 1e-6)
        job.pace += defaults.SOURCE_SMOOTHING * (pace - job.pace)
        travelled = self._transport.round_trip_seconds(line.source)
        flowing = max(0.0, 1.0 - travelled / max(seconds, 1e-6))
        job.flowing += defaults.SOURCE_SMOOTHING * (flowing - job.flowing)
        line.pause = defaults.NOT_YET_SECONDS
        line.busy_pause = defaults.BUSY_SECONDS
        job.busy_pause = max(job.busy_pause / 2, defaults.FETCH_BUSY_SECONDS)
        line.reason = "sent pieces"
        job.bytes_by_source[line.name] += reference.size_bytes
        self._events.emit(
            "shardcast.piece_received",
            lineage=job.key[0],
            step=job.key[1],
            piece=index,
            source=line.name,
            bytes=reference.size_bytes,
            seconds=seconds,
        )
        return True

    def _rest(self, job: _Job, line: _Line, now: float) -> None:
        """A source is busy: it is left alone for a while, and no more is asked for at once."""
        line.not_before = now + line.busy_pause * (0.5 + 0.5 * self._world.random.random())
        line.busy_pause = min(2 * line.busy_pause, defaults.BUSY_SECONDS_MAX)
        share = min(1.0, 2 * job.active / self._parallel)
        job.more_at = now + share * job.busy_pause
        job.busy_pause = min(2 * job.busy_pause, defaults.BUSY_SECONDS_MAX)

    async def _copy_in(self, job: _Job, index: int, spare: str) -> None:
        """Copy a piece from a spare file to its place."""
        reference = job.reference(index)
        sink = await self._sink(job, index)
        try:
            await self._store.disk.copy(spare, 0, reference.size_bytes, sink)
            piece = sink.finish()
            if not piece.verify(reference.digest):
                raise OSError(errno.EIO, "the disk gave back other bytes than were written", spare)
            await sink.commit(piece)
        finally:
            sink.abandon()

    async def _landed(self, job: _Job, index: int) -> None:
        """A verified piece is in its place."""
        if index == _MANIFEST:
            found = await self._store.begin(job.key, job.digest)
            if job.total_bytes not in (0, found.manifest.total_bytes):
                await self._store.withdraw(job.key)
                raise BadManifest(
                    f"checkpoint {job.key[0]}/{job.key[1]} was announced with {job.total_bytes:,} "
                    f"bytes, and its manifest lists {found.manifest.total_bytes:,}"
                )
            job.found = found
        else:
            assert job.held is not None
            self._store.landed(job.held, index)

    def _refused(self, job: _Job, index: int, line: _Line) -> None:
        """A source did wrong, or failed."""
        self._tell(job, "shardcast.piece_refused", index, line)

    def _passed_over(self, job: _Job, index: int, line: _Line) -> None:
        """A source was too slow, or lacks again and again what it is asked for: no wrong, but the
        reason why others are asked."""
        self._tell(job, "shardcast.source_passed_over", index, line)

    def _tell(self, job: _Job, event: str, index: int, line: _Line) -> None:
        self._events.emit(
            event,
            lineage=job.key[0],
            step=job.key[1],
            piece=index,
            source=line.name,
            reason=line.reason,
        )
