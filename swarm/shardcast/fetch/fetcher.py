"""The fetcher of checkpoints: the manifest, then every missing piece."""

from collections.abc import Collection
from math import inf

import trio

from swarm.errors import DeadlineError
from swarm.events import Events
from swarm.shardcast import limits
from swarm.shardcast.chain import Deltas
from swarm.shardcast.fetch.choosing import Chooser
from swarm.shardcast.fetch.job import Arriving, Job, Request, Sources, Width, seconds_for
from swarm.shardcast.fetch.requesting import Requester
from swarm.shardcast.have.streams import HaveExchange
from swarm.shardcast.held import Held, Key, delta_key
from swarm.shardcast.manifest import BadManifest
from swarm.shardcast.sources import SourceBook
from swarm.shardcast.store import CheckpointConflict, CheckpointStore
from swarm.transport import BlobTransport, FetchError
from swarm.wire.identity import PeerId
from swarm.wire.messages import Checkpoint
from swarm.world import World

LOOK_SECONDS_MIN = 0.01
"""A fetch with free lanes and no news looks for sources no more often than this."""

TOGETHER_MAX = 64
"""Requests of all fetches of a peer at once. A trainer fetches from each of the others at the end
of a round: with the usual number each, a piece would share the line with hundreds, too late."""

TOGETHER_SHARE = 1 / 2
"""On a slow line they are fewer: as many pieces as arrive in this part of a piece's deadline. Below
50 Mb/s the line would not carry 64 pieces of 4 MB in time."""


class Fetcher:
    """Fetches checkpoints into a store. One per peer; it may fetch several at once."""

    def __init__(
        self,
        world: World,
        transport: BlobTransport,
        store: CheckpointStore,
        events: Events,
        *,
        have: HaveExchange | None = None,
        deltas: Deltas | None = None,
    ) -> None:
        self._world = world
        self._store = store
        self._events = events
        self._have = have
        self._deltas = deltas
        self.book = SourceBook(world)
        self.width = Width()
        self.arriving = Arriving(store)
        self._chooser = Chooser(world, transport.peer_id, self.book, have, self.width)
        self._requester = Requester(world, transport, store, events, self.book, self.width)
        self._jobs: dict[Key, Job] = {}
        if have is not None:
            have.claims.on_change(self._claims_changed)

    def _claims_changed(self, peer: PeerId, manifests: Collection[bytes] | None) -> None:
        assert self._have is not None
        for job in self._jobs.values():
            if manifests is not None and job.digest not in manifests:
                continue
            line = job.lines.get(peer)
            if line is None:
                job.look_at = 0.0
            else:
                claim = self._have.claims.of(peer, job.digest)
                if claim is not line.claim:
                    line.claim = claim
                    line.not_before = 0.0
            self._chooser.widen(job)
            self._note_lateness()
            if job.active < job.width and job.more_at <= self._world.now():
                job.changed.set()

    async def fetch(
        self,
        checkpoint: Checkpoint,
        sources: Sources,
        *,
        deadline_seconds: float = limits.CHECKPOINT_DEADLINE_SECONDS,
        is_delta: bool = False,
        name: str = "",
        folders: Collection[str] = (),
        plain: bool = False,
    ) -> str:
        """Fetch a checkpoint unless it is complete here; returns its folder on this peer's disk.

        With `folders`, only the files in these folders of it are fetched, and it stays incomplete
        unless they were the last: the caller keeps it from being trimmed (`CheckpointStore.pin`).

        Deltas are used if its manifest names a short chain from an older checkpoint in the store.
        `name` is what the log calls it: "policy 3" by default, or the delta to it.

        The caller trusts the announcement; everything fetched is checked against it. `plain`: it
        does not trust the manifest, whose mirrors and deltas are then ignored. A second fetch of
        the same checkpoint waits for the first.

        A cancelled or failed fetch keeps its pieces; the next one resumes. Raises `DeadlineError`
        naming the sources and what was wrong with each, `DiskFullError`, `BadManifest`,
        `CheckpointConflict`."""
        key: Key = (checkpoint.lineage, checkpoint.step)
        key = delta_key(key) if is_delta else key
        name = name or f"{'the delta to ' if is_delta else ''}policy {checkpoint.step}"
        started = self._world.now()
        waiting_for = "another fetch of it"
        try:
            with trio.fail_after(deadline_seconds):
                while (running := self._jobs.get(key)) is not None:
                    await running.done.wait()
                job = self._jobs[key] = Job(key, checkpoint, sources, started, folders, plain)
                self.arriving.begin(job, is_delta=is_delta)
                self._store.pin(key)
                try:
                    folder = await self._already(key, checkpoint)
                    return folder if folder is not None else await self._run(job, name)
                finally:
                    waiting_for = job.waiting_for()
                    self._store.unpin(key)
                    del self._jobs[key]
                    self._note_lateness()
                    job.done.set()
        except trio.TooSlowError as error:
            raise DeadlineError(
                f"{'the delta to ' if is_delta else ''}checkpoint {key[0]}/{key[1]} was not "
                f"fetched within {deadline_seconds:g} s ({waiting_for})"
            ) from error

    async def _already(self, key: Key, checkpoint: Checkpoint) -> str | None:
        """The folder of a checkpoint complete here. Discards one with another manifest."""
        held = self._store.held(key)
        if held is None:
            return None
        if held.digest != checkpoint.reference.digest:
            if held.complete:
                raise CheckpointConflict(
                    f"checkpoint {key[0]}/{key[1]} is already on disk with another manifest "
                    f"({held.digest.hex()[:12]}) than was announced "
                    f"({checkpoint.reference.digest.hex()[:12]})"
                )
            await self._store.discard(key)
            return None
        return held.folder if held.complete else None

    async def _run(self, job: Job, name: str) -> str:
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
        if job.held.missing():
            return job.held.folder
        folder = await self._store.finish(job.held)
        self._events.emit(
            "shardcast.checkpoint_complete",
            name=name,
            lineage=job.key[0],
            step=job.key[1],
            seconds=self._world.now() - job.started,
            bytes=job.held.manifest.total_bytes,
            delta=job.held.is_delta,
            bytes_fetched=sum(job.bytes_by_source.values()),
            by_source=dict(sorted(job.bytes_by_source.items())),
        )
        return folder

    async def _begin(self, job: Job, held: Held) -> None:
        """Copy pieces from other checkpoints and make pieces from deltas; the rest is missing.

        This may take long, so no request runs meanwhile."""
        await self._store.want(held, job.folders)
        await self._store.copy_known(held, job.folders)
        if self._deltas is not None and not held.is_delta and not job.plain:
            await self._deltas.fill(
                held,
                lambda delta, seconds: self.fetch(
                    delta, job.sources, deadline_seconds=seconds, is_delta=True
                ),
            )
        job.want_missing(held)

    async def _are_files_right(self, job: Job, held: Held) -> bool:
        """Whether a fetch with every piece is finished.

        Each piece was checked by its hash. If deltas were used, the SHA-256 of the files is checked
        too; pieces that the disk lost meanwhile are then missing again."""
        if not held.unproven:
            return True
        try:
            await self._store.check_files(held)
        except BadManifest as error:
            job.error = error
            return True
        job.want_missing(held)
        job.changed.set()
        return not job.missing

    async def _hand_out(self, job: Job, nursery: trio.Nursery) -> None:
        """Start lanes until the manifest has arrived, or, once it has, until every piece has."""
        job.width = self.width.usual
        job.per_source = self.width.per_source
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

    def _end_if_hopeless(self, job: Job) -> None:
        """End a fetch from mirrors alone once each lacks the missing pieces or has them wrong. In a
        fetch from peers a newcomer may still have them."""
        if self._have is not None or not job.missing or job.attempts or job.landing:
            return
        lines = [line for _, line in sorted(job.known.items())]
        if not lines or any(job.missing & ~line.barred for line in lines):
            return
        assert job.held is not None
        count = job.missing.bit_count()
        first = (job.missing & -job.missing).bit_length() - 1
        piece = job.held.manifest.pieces[first]
        why = "; ".join(f"{line.name}: {line.faults[first]}" for line in lines)
        job.error = FetchError(
            f"no mirror has {count} of the {len(job.held.pieces)} pieces of checkpoint "
            f"{job.key[0]}/{job.key[1]}; the first is piece {first}, of "
            f"{job.held.manifest.files[piece.file].name}, blob/{piece.digest.hex()} ({why}). "
            "Fetched pieces are kept: repair the mirror or name another one, and fetch again"
        )
        job.scope.cancel()

    def _assign(self, job: Job, nursery: trio.Nursery) -> float:
        """Start a request on every free lane; returns when to try again if nothing changes."""
        now = self._world.now()
        overdue, wake_at = 0, inf
        for attempt in job.all_attempts():
            if attempt.hedge_at <= now:
                overdue += 1
            elif attempt.hedge_at < wake_at:
                wake_at = attempt.hedge_at
        if job.look_at <= now or (overdue and self._is_ending()):
            job.look_at = now + limits.SOURCES_RECHECK_SECONDS
            self._chooser.look(job)
            self._note_lateness()
        # Overdue attempts do not count against the lanes: else a few sources that trickle or hang
        # could occupy all lanes until their deadlines.
        lanes = min(job.width + min(overdue, self.width.most), self._room(job))
        while job.active < lanes and job.more_at <= now:
            request = self._chooser.next(job, None, now)
            if request is None and self._is_ending():
                request = self._chooser.hedge(job, now)
            if request is None:
                break
            wake_at = min(wake_at, request.attempts[0].hedge_at)  # the first of them is the soonest
            nursery.start_soon(self._lane, job, request)
        if job.active < lanes:
            if job.more_at > now:
                return min(wake_at, job.more_at)
            wake_at = min(wake_at, job.look_at)
            for line in job.known.values():
                if line.record is None:
                    line.record = self.book.record(line.name)
                ready_at = max(line.not_before, line.record.paused_until)
                if now < ready_at < wake_at:
                    wake_at = ready_at
        return max(wake_at, now + LOOK_SECONDS_MIN)

    def _room(self, job: Job) -> int:
        """How many requests a fetch may make at once beside the other fetches; two at least, so
        that no fetch that gets nothing holds up another, nor a source that hangs this one."""
        others = 0
        if len(self._jobs) > 1:
            others = sum(each.active for each in self._jobs.values()) - job.active
        size = job.held.manifest.piece_size if job.held is not None else limits.PIECE_BYTES_MIN
        in_time = int(self.book.inflow * TOGETHER_SHARE * seconds_for(size) / size)
        return max(2, min(TOGETHER_MAX, max(in_time, self.width.usual)) - others)

    def _is_ending(self) -> bool:
        """Whether every missing piece is requested. Before, a second request for one that takes too
        long would only take the line from the others."""
        return not any(each.missing for each in self._jobs.values())

    async def _lane(self, job: Job, request: Request | None) -> None:
        while request is not None:
            with request.scope as scope:
                while request is not None and request.scope is scope:
                    await self._requester.perform(job, request)
                    request = self._follow(job, request, scope)
            if scope.cancelled_caught:
                assert request is not None
                self._requester.given_up(job, request)
                request = self._follow(job, request, scope)

    def _follow(self, job: Job, last: Request, scope: trio.CancelScope) -> Request | None:
        now = self._world.now()
        free = job.active < min(job.width, self._room(job))
        request = self._chooser.next(job, last.line, now) if free else None
        wanting = request is None or job.active < job.width
        if (wanting and job.more_at <= now) or not job.active:
            job.changed.set()
        if request is not None and not scope.cancel_called:
            # To enter another scope takes longer than to choose a source.
            scope.deadline = request.scope.deadline
            request.scope = scope
        return request

    def _note_lateness(self) -> None:
        if self._have is not None:
            self._have.late = any(job.late for job in self._jobs.values())
