"""Performing one request to one source: fetch its pieces, check each, write each to its file."""

import errno
from dataclasses import dataclass

import trio

from swarm.errors import DiskFullError
from swarm.events import Events
from swarm.shardcast import limits
from swarm.shardcast.fetch.job import (
    BUSY_SECONDS,
    BUSY_SECONDS_MAX,
    BUSY_SHARE,
    MANIFEST,
    NEW_LANE_SECONDS,
    NOT_YET_SECONDS,
    NOT_YET_SECONDS_MAX,
    Attempt,
    Job,
    Line,
    Request,
    Width,
)
from swarm.shardcast.manifest import BadManifest
from swarm.shardcast.sources import SourceBook
from swarm.shardcast.store import CheckpointStore
from swarm.transport import BlobTransport, FetchError
from swarm.world import Piece, Sink, World


class _WrongBytes(Exception):
    """A piece of a request was wrong: the rest of its pieces is refused."""


@dataclass(eq=False)
class Requester:
    """Performs the requests of every fetch of one peer."""

    _world: World
    _transport: BlobTransport
    _store: CheckpointStore
    _events: Events
    _book: SourceBook
    _width: Width

    async def perform(self, job: Job, request: Request) -> None:
        """Fetch the pieces of a request; a failure is noted for its source or ends the job.

        Inside `request.scope`; when that has ended it, call `given_up`."""
        try:
            await self._ask(job, request)
        except (DiskFullError, BadManifest) as error:
            if isinstance(error, DiskFullError) and request.attempts[0].spare:
                # Not fatal: another attempt at this piece is running.
                job.spare_at = self._world.now() + limits.SOURCES_RECHECK_SECONDS
            else:
                job.error = error
                job.scope.cancel()
        finally:
            job.active -= 1
            request.line.active -= 1
            request.late = request.attempts[0] if request.attempts else None
            while request.attempts:
                job.end(request.attempts[0])

    def given_up(self, job: Job, request: Request) -> None:
        """Note that a request was ended: it took too long, or another source was first."""
        line, late = request.line, request.late
        if late is None:
            return  # its last piece came at that moment
        now = self._world.now()
        seconds = now - request.started
        # If another source was first, this time bounds the bandwidth of this one.
        self._book.given_up(line.name, request.size_bytes, seconds)
        if seconds >= request.seconds:
            line.reason = f"did not send a piece within {request.seconds:.0f} s"
            self._book.failed(line.name)
            self._report("piece_refused", job, late.piece, line)
        elif late.hedge_at <= now:
            line.reason = f"was overtaken by another source after {seconds:.1f} s"
            self._report("source_passed_over", job, late.piece, line)

    async def _sink(self, job: Job, index: int) -> Sink:
        """A sink for the file range of a piece. At most one attempt at a time may write to it."""
        if index == MANIFEST:
            return await self._store.manifest_sink(job.key, job.manifest_bytes)
        assert job.held is not None
        return self._store.sink(job.held, index)

    async def _ask(self, job: Job, request: Request) -> None:
        index = request.attempts[0].piece
        if not request.attempts[0].spare:
            sinks = [await self._sink(job, attempt.piece) for attempt in request.attempts]
            await self._receive(job, request, sinks, None)
            return
        size = job.reference(index).size_bytes
        async with self._store.spare_file(size) as path:
            await self._receive(job, request, [self._store.disk.sink(path, 0, size)], path)

    async def _receive(
        self, job: Job, request: Request, sinks: list[Sink], spare: str | None
    ) -> None:
        """Fetch the pieces of a request into `sinks`, check and commit each. `spare`: the file of
        the only sink, if it is a spare file."""
        line = request.line
        try:
            if len(sinks) == 1:
                reference = job.reference(request.attempts[0].piece)
                piece = await self._transport.fetch(line.source, reference, sinks[0])
                seconds = self._world.now() - request.started
                await self._arrived(job, request.attempts[0], sinks[0], piece, seconds, spare)
            else:
                await self._receive_several(job, request, sinks)
        except FetchError as error:
            line.reason = str(error)
            now = self._world.now()
            index = request.attempts[0].piece
            if error.busy:
                self._rest(job, line, now)
            elif error.lacks and line.source.peer is None and index != MANIFEST:
                line.bar(index, str(error))
                self._report("piece_refused", job, index, line)
            elif error.retry and (line.claim is None or not line.claim.has(index)):
                line.not_before = now + line.pause
                if line.pause < NOT_YET_SECONDS_MAX <= 2 * line.pause:
                    self._report("source_passed_over", job, index, line)
                line.pause = min(2 * line.pause, NOT_YET_SECONDS_MAX)
            else:
                self._book.failed(line.name)
                self._report("piece_refused", job, index, line)
        finally:
            for sink in sinks:
                sink.abandon()

    async def _receive_several(self, job: Job, request: Request, sinks: list[Sink]) -> None:
        wanted = [
            (job.reference(attempt.piece), sink)
            for attempt, sink in zip(request.attempts, sinks, strict=True)
        ]
        left = iter(sinks)
        count = 0

        async def arrived(piece: Piece) -> None:
            nonlocal count
            count += 1
            # Later pieces arrive while the first is checked: only the average time is meaningful.
            seconds = (self._world.now() - request.started) / count
            attempt = request.attempts[0]
            if not await self._arrived(job, attempt, next(left), piece, seconds, None):
                raise _WrongBytes
            job.end(attempt)

        try:
            await self._transport.fetch_run(request.line.source, wanted, arrived)
        except _WrongBytes:
            return  # noted already

    async def _arrived(
        self,
        job: Job,
        attempt: Attempt,
        sink: Sink,
        piece: Piece,
        seconds: float,
        spare: str | None,
    ) -> bool:
        """Check and commit a piece that arrived after `seconds`; False if it was wrong."""
        index, line = attempt.piece, attempt.request.line
        reference = job.reference(index)
        if index in job.landing or job.is_here(index):
            return True
        if piece.size_bytes != reference.size_bytes or not piece.verify(reference.digest):
            self._blame(job, index, line)
            return False
        job.landing.add(index)
        others = [other for other in job.attempts[index] if other is not attempt]
        for other in others:
            other.request.scope.cancel()
        try:
            await sink.commit(piece)
            if spare is not None:
                for other in others:
                    if other in job.attempts[index]:
                        other.ended = trio.Event()
                        await other.ended.wait()
                await self._copy_in(job, index, spare)
            if index == MANIFEST:
                job.found = await self._store.begin(
                    job.key, job.digest, job.total_bytes, all_files=not job.folders
                )
            else:
                assert job.held is not None
                self._store.landed(job.held, index)
        finally:
            job.landing.discard(index)
        self._credit(job, line, reference.size_bytes, seconds)
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

    def _blame(self, job: Job, index: int, line: Line) -> None:
        line.reason = "sent wrong bytes"
        if line.source.peer is None and index != MANIFEST:
            # A mirror does not lie: one of its files is damaged, but others may be right.
            line.bar(index, line.reason)
            self._book.failed(line.name)
        else:
            self._book.corrupt(line.name)
        self._report("piece_refused", job, index, line)

    def _credit(self, job: Job, line: Line, size_bytes: int, seconds: float) -> None:
        self._book.succeeded(line.name, size_bytes, seconds)
        pace = size_bytes / max(seconds, 1e-6)
        job.pace += limits.SOURCE_SMOOTHING * (pace - job.pace)
        travelled = self._transport.round_trip_seconds(line.source)
        flowing = max(0.0, 1.0 - travelled / max(seconds, 1e-6))
        job.flowing += limits.SOURCE_SMOOTHING * (flowing - job.flowing)
        line.pause = NOT_YET_SECONDS
        line.busy_pause = BUSY_SECONDS
        job.busy_pause = max(job.busy_pause / 2, NEW_LANE_SECONDS)
        line.reason = "sent pieces"
        job.bytes_by_source[line.name] += size_bytes

    def _rest(self, job: Job, line: Line, now: float) -> None:
        # Soon after the beginning few have anything to send, and each second brings more of them.
        most = min(BUSY_SHARE * (now - job.started), BUSY_SECONDS_MAX)
        line.not_before = now + line.busy_pause * (0.5 + 0.5 * self._world.random.random())
        line.busy_pause = min(2 * line.busy_pause, max(BUSY_SECONDS, most))
        job.more_at = now + min(1.0, 2 * job.active / self._width.usual) * min(job.busy_pause, most)
        job.busy_pause = min(2 * job.busy_pause, max(NEW_LANE_SECONDS, most))

    async def _copy_in(self, job: Job, index: int, spare: str) -> None:
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

    def _report(self, event: str, job: Job, index: int, line: Line) -> None:
        """Report that a source failed or sent wrong bytes (`piece_refused`), or was too slow or
        lacks a piece (`source_passed_over`)."""
        self._events.emit(
            f"shardcast.{event}",
            lineage=job.key[0],
            step=job.key[1],
            piece=index,
            source=line.name,
            reason=line.reason,
        )
