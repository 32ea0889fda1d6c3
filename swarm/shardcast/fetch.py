"""From an announcement to a complete folder: pieces from several sources at once.

One loop hands out work whenever something changed: to a source sampled from the book, the rarest
piece that it claims. The manifest is fetched like a piece. When every piece is asked for and slots
are free, the slowest ones are asked of further sources too; the first right answer wins and the
others are cancelled. Nothing that was committed is ever fetched again, also after a restart.
"""

from __future__ import annotations

import errno
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import trio

from swarm import defaults
from swarm.errors import DeadlineError, DiskFullError, SwarmError
from swarm.events import Events
from swarm.identity import PeerId
from swarm.messages import Checkpoint
from swarm.shardcast.chain import Deltas
from swarm.shardcast.have import Claim, HaveExchange
from swarm.shardcast.manifest import BadManifest
from swarm.shardcast.sources import SourceBook, source_name
from swarm.shardcast.store import CheckpointConflict, CheckpointStore, Held, Key, delta_key
from swarm.transport import BlobReference, BlobTransport, FetchError, Source
from swarm.world import Sink, World

Sources = Callable[[], Iterable[Source]]
"""Who may have the checkpoint, as of now; asked again while the fetch goes on."""

_MANIFEST = -1
"""The manifest's number among the pieces."""

_CANDIDATES = 64
"""Missing pieces compared when the rarest is looked for; they are in random order."""


class Superseded(SwarmError):
    """A fetch was given up for a newer checkpoint's. What it has stays on disk."""


@dataclass(eq=False)
class _Attempt:
    """One piece asked of one source."""

    name: str
    started: float
    hedge_at: float
    """From when on the piece may be asked of another source as well."""
    spare: bool
    """Another attempt writes to the piece's place, so this one writes to a spare file."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)


@dataclass
class _Line:
    """What a fetch remembers of one source."""

    active: int = 0
    not_before: float = 0.0
    pause: float = defaults.NOT_YET_SECONDS
    reason: str = "was not asked"


class _Job:
    """One running fetch."""

    def __init__(self, key: Key, checkpoint: Checkpoint, sources: Sources, started: float) -> None:
        self.key = key
        self.caller_sources = sources
        self.digest = checkpoint.manifest_digest
        self.manifest_bytes = checkpoint.manifest_bytes
        self.started = started
        self.held: Held | None = None
        self.missing: dict[int, None] = {_MANIFEST: None}
        """Pieces that nobody is asked for, in random order."""
        self.attempts: dict[int, list[_Attempt]] = {}
        self.landing: set[int] = set()
        """Pieces that arrived right and are being committed."""
        self.lines: dict[str, _Line] = {}
        self.active = 0
        self.bytes_by_source: Counter[str] = Counter()
        self.changed = trio.Event()
        self.scope = trio.CancelScope()
        self.superseded_by: Key | None = None
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
        mirrors = self.held.manifest.mirrors if self.held is not None else ()
        return itertools.chain(
            self.caller_sources(), (Source(addresses=(mirror,)) for mirror in mirrors)
        )

    def line(self, name: str) -> _Line:
        return self.lines.setdefault(name, _Line())

    def all_attempts(self) -> Iterator[_Attempt]:
        return itertools.chain.from_iterable(self.attempts.values())

    def waiting_for(self) -> str:
        """Whom this fetch waits for and why, for the error that ends it."""
        if not self.lines:
            return "no source is known"
        some = [f"{name}: {line.reason}" for name, line in sorted(self.lines.items())]
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
        self._parallel_per_source = parallel_per_source
        self._jobs: dict[Key, _Job] = {}
        if have is not None:
            have.on_change(self._claims_changed)

    def sources_changed(self) -> None:
        """Sources appeared or vanished: look again at once."""
        for job in self._jobs.values():
            job.changed.set()

    def _claims_changed(self, peer: PeerId) -> None:
        for job in self._jobs.values():
            if peer in job.lines:
                job.lines[peer].not_before = 0.0
            job.changed.set()

    async def fetch(
        self,
        checkpoint: Checkpoint,
        sources: Sources,
        *,
        deadline_seconds: float = defaults.CHECKPOINT_DEADLINE_SECONDS,
        supersede: bool = False,
        is_delta: bool = False,
    ) -> str:
        """The folder of a complete checkpoint on this peer's disk, fetched if it is not there: by
        deltas where an older one is here and its manifest names a short chain from that.

        The announcement must have been believed already; everything fetched is checked against
        it. A second fetch of the same checkpoint waits for the first. With `supersede`, running
        fetches of older checkpoints that are not pinned end with `Superseded`; leave it off
        where announcements may come faster than fetches end, or none would ever end.

        Cancelled or failed, it keeps what it has and goes on there next time. Raises
        `DeadlineError` naming the sources and what was wrong with each, `DiskFullError`,
        `BadManifest`, `CheckpointConflict`, `Superseded`.
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
                folder = await self._already(key, checkpoint)
                if folder is not None:
                    return folder
                job = self._jobs[key] = _Job(key, checkpoint, sources, started)
                self._store.pin(key)
                try:
                    if supersede:
                        self._supersede(key)
                    return await self._run(job)
                finally:
                    waiting_for = job.waiting_for()
                    self._store.unpin(key)
                    del self._jobs[key]
                    job.done.set()
        except trio.TooSlowError as error:
            raise DeadlineError(
                f"checkpoint {key[0]}/{key[1]} was not fetched within {deadline_seconds:g} s "
                f"({waiting_for})"
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

    def _supersede(self, key: Key) -> None:
        for older, job in self._jobs.items():
            # The fetch itself holds one pin.
            if older < key and not self._store.is_pinned(older, more_than=1):
                job.superseded_by = key
                job.scope.cancel()

    async def _run(self, job: _Job) -> str:
        with job.scope:
            held = self._store.held(job.key)
            if held is not None:
                await self._begun(job, held)
            async with trio.open_nursery() as nursery:
                await self._hand_out(job, nursery)
        if job.error is not None:
            raise job.error
        if job.superseded_by is not None:
            raise Superseded(
                f"the fetch of checkpoint {job.key[0]}/{job.key[1]} gave way to "
                f"{job.superseded_by[0]}/{job.superseded_by[1]}"
            )
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

    async def _begun(self, job: _Job, held: Held) -> None:
        """The manifest is here: from now on its missing pieces are wanted."""
        await self._store.copy_known(held)
        if self._deltas is not None and not held.is_delta:
            await self._deltas.fill(held, functools.partial(self._fetch_delta, job))
        missing = held.missing()
        # In order only from mirrors: among peers everybody must not ask for the same piece, but
        # where nobody else follows a file's hash keeps up with its pieces.
        if self._have is not None:
            self._world.random.shuffle(missing)
        job.held = held
        job.missing = dict.fromkeys(missing)

    async def _fetch_delta(self, job: _Job, delta: Checkpoint, deadline_seconds: float) -> str:
        return await self.fetch(
            delta, job.caller_sources, deadline_seconds=deadline_seconds, is_delta=True
        )

    # --- handing out work --------------------------------------------------------------------

    async def _hand_out(self, job: _Job, nursery: trio.Nursery) -> None:
        """Start attempts until nothing is missing and nothing under way."""
        while job.held is None or job.missing or job.attempts or job.landing:
            job.changed = trio.Event()
            wake_at = self._assign(job, nursery)
            with trio.move_on_at(wake_at):
                await job.changed.wait()

    def _assign(self, job: _Job, nursery: trio.Nursery) -> float:
        """Give every free slot a piece; returns when to look again if nothing changes."""
        now = self._world.now()
        wake_at = now + defaults.SOURCES_RECHECK_SECONDS
        known = {
            source_name(source): source
            for source in job.sources()
            if source.peer != self._transport.peer_id
        }
        able: list[str] = []
        for name in known:
            line = job.line(name)
            ready_at = max(line.not_before, self.book.paused_until(name))
            if ready_at > now:
                wake_at = min(wake_at, ready_at)
            elif line.active < self._parallel_per_source:
                able.append(name)
        # Slots held by sources that are overdue are lent out again, else a few that trickle or
        # hang could hold all of them until their deadlines.
        overdue = sum(attempt.hedge_at <= now for attempt in job.all_attempts())
        slots = self._parallel + min(overdue, self._parallel)
        # Whoever has everything makes no piece rarer than another.
        claims = self._have.claims_on(job.digest) if self._have is not None else []
        claims = [claim for claim in claims if not claim.complete]
        while able and job.active < slots and job.missing:
            # Whoever says to have something comes before whoever says nothing.
            claiming = [name for name in able if self._claim(job, known[name]) is not None]
            name = self.book.choose(claiming or able)
            index = self._rarest(job, known[name], claims)
            if index is None:
                able.remove(name)
                continue
            del job.missing[index]
            self._start(job, index, known[name], nursery)
            if job.line(name).active >= self._parallel_per_source:
                able.remove(name)
        if not job.missing:
            self._hedge(job, known, able, nursery)
        due = [attempt.hedge_at for attempt in job.all_attempts() if attempt.hedge_at > now]
        return min([wake_at, *due])

    def _rarest(self, job: _Job, source: Source, claims: Sequence[Claim]) -> int | None:
        """Of some missing pieces that a source may have, the one that fewest neighbours have."""
        candidates: list[int] = []
        for index in job.missing:
            if self._may_have(job, source, index):
                candidates.append(index)
                if len(candidates) == (_CANDIDATES if claims else 1):
                    break
        if not candidates:
            return None
        return min(candidates, key=lambda index: sum(claim.has(index) for claim in claims))

    def _may_have(self, job: _Job, source: Source, index: int) -> bool:
        claim = self._claim(job, source)
        if claim is not None:
            return index == _MANIFEST or claim.has(index)
        if self._have is None or source.peer is None:
            return True
        # A neighbour that never spoke of this checkpoint will do so once it has some of it; asked
        # all the same after a while, since it may have forgotten to.
        waited = self._world.now() - job.started
        return not self._have.speaks(source.peer) or waited >= defaults.HAVE_SILENCE_SECONDS

    def _claim(self, job: _Job, source: Source) -> Claim | None:
        if self._have is None or source.peer is None:
            return None
        return self._have.claim(source.peer, job.digest)

    def _hedge(
        self, job: _Job, known: dict[str, Source], able: list[str], nursery: trio.Nursery
    ) -> None:
        """Ask further sources for the last pieces that take too long."""
        now = self._world.now()
        for index, attempts in job.attempts.items():
            # One more only when every copy under way is late: liars that hang cannot use up the
            # copies, and an honest source is left its time.
            if index in job.landing or max(attempt.hedge_at for attempt in attempts) > now:
                continue
            asked = {attempt.name for attempt in attempts}
            others = [
                name
                for name in able
                if name not in asked
                and job.line(name).active < self._parallel_per_source
                and self._may_have(job, known[name], index)
            ]
            if others and job.active < 2 * self._parallel:
                self._start(job, index, known[self.book.choose(others)], nursery)

    def _start(self, job: _Job, index: int, source: Source, nursery: trio.Nursery) -> None:
        name = source_name(source)
        now = self._world.now()
        expected = job.reference(index).size_bytes / self.book.bandwidth(name)
        hedge_at = now + max(2 * expected, defaults.FETCH_HEDGE_SECONDS)
        attempts = job.attempts.setdefault(index, [])
        attempt = _Attempt(name, now, hedge_at, spare=bool(attempts))
        attempts.append(attempt)
        job.line(name).active += 1
        job.active += 1
        nursery.start_soon(self._attempt, job, index, source, attempt)

    # --- one piece from one source -----------------------------------------------------------

    async def _attempt(self, job: _Job, index: int, source: Source, attempt: _Attempt) -> None:
        try:
            with attempt.scope:
                await self._ask(job, index, source, attempt)
            if attempt.scope.cancelled_caught:
                # Another source was first: this one can at best have been this fast.
                size = job.reference(index).size_bytes
                self.book.given_up(attempt.name, size, self._world.now() - attempt.started)
        except (DiskFullError, BadManifest) as error:
            job.error = error
            job.scope.cancel()
        finally:
            attempt.ended.set()
            job.active -= 1
            job.line(attempt.name).active -= 1
            attempts = job.attempts[index]
            attempts.remove(attempt)
            if not attempts:
                del job.attempts[index]
                if not self._is_here(job, index):
                    job.missing[index] = None
            job.changed.set()

    @staticmethod
    def _is_here(job: _Job, index: int) -> bool:
        if index == _MANIFEST:
            return job.held is not None
        return job.held is not None and bool(job.held.pieces[index])

    async def _sink(self, job: _Job, index: int) -> Sink:
        """The place of a piece. At most one attempt at a time may write to it."""
        if index == _MANIFEST:
            return await self._store.manifest_sink(job.key, job.manifest_bytes)
        assert job.held is not None
        return self._store.sink(job.held, index)

    async def _ask(self, job: _Job, index: int, source: Source, attempt: _Attempt) -> None:
        if not attempt.spare:
            await self._receive(job, index, source, attempt, await self._sink(job, index), None)
            return
        size = job.reference(index).size_bytes
        async with self._store.spare_file(size) as path:
            sink = self._store.disk.sink(path, 0, size)
            await self._receive(job, index, source, attempt, sink, path)

    async def _receive(
        self,
        job: _Job,
        index: int,
        source: Source,
        attempt: _Attempt,
        sink: Sink,
        spare: str | None,
    ) -> None:
        """Fetch one piece into `sink` (of the file `spare`, if given), check and place it."""
        reference = job.reference(index)
        line = job.line(attempt.name)
        try:
            deadline = (
                defaults.PIECE_DEADLINE_SECONDS
                + reference.size_bytes / defaults.PIECE_BYTES_PER_SECOND_MIN
            )
            with trio.fail_after(deadline):
                piece = await self._transport.fetch(source, reference, sink)
            seconds = self._world.now() - attempt.started
            if index in job.landing or self._is_here(job, index):
                return
            if piece.size_bytes != reference.size_bytes or not piece.verify(reference.digest):
                line.reason = "sent wrong bytes"
                self.book.corrupt(attempt.name)
                self._refused(job, index, attempt.name, line.reason)
                return
            job.landing.add(index)
            others = [other for other in job.attempts[index] if other is not attempt]
            for other in others:
                other.scope.cancel()
            try:
                await sink.commit(piece)
                if spare is not None:
                    for other in others:
                        await other.ended.wait()
                    await self._copy_in(job, index, spare)
                await self._landed(job, index)
            finally:
                job.landing.discard(index)
            self.book.succeeded(attempt.name, reference.size_bytes, seconds)
            line.pause = defaults.NOT_YET_SECONDS
            line.reason = "sent pieces"
            job.bytes_by_source[attempt.name] += reference.size_bytes
            self._events.emit(
                "shardcast.piece_received",
                lineage=job.key[0],
                step=job.key[1],
                piece=index,
                source=attempt.name,
                bytes=reference.size_bytes,
                seconds=seconds,
            )
        except FetchError as error:
            line.reason = str(error)
            claim = self._claim(job, source)
            if error.retry and (claim is None or not claim.has(index)):
                line.not_before = self._world.now() + line.pause
                line.pause = min(2 * line.pause, defaults.NOT_YET_SECONDS_MAX)
                return
            self.book.failed(attempt.name)
            self._refused(job, index, attempt.name, line.reason)
        except trio.TooSlowError:
            line.reason = f"did not send a piece within {deadline:.0f} s"
            self.book.failed(attempt.name)
            self.book.given_up(attempt.name, reference.size_bytes, deadline)
            self._refused(job, index, attempt.name, line.reason)
        finally:
            sink.abandon()

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
            await self._begun(job, await self._store.begin(job.key, job.digest))
        else:
            assert job.held is not None
            await self._store.landed(job.held, index)

    def _refused(self, job: _Job, index: int, name: str, reason: str) -> None:
        self._events.emit(
            "shardcast.piece_refused",
            lineage=job.key[0],
            step=job.key[1],
            piece=index,
            source=name,
            reason=reason,
        )
