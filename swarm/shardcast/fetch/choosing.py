"""The choice of the next piece that a fetch requests, and of its source."""

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.shardcast.fetch.job import MANIFEST, Attempt, Job, Line, Request, Width
from swarm.shardcast.have.streams import HaveExchange
from swarm.shardcast.rarity import draw
from swarm.shardcast.sources import SourceBook, source_name
from swarm.wire.identity import PeerId
from swarm.world import World

FLOWING_SHARE = 0.8
"""Part of a request's time in which bytes should flow; more requests are made where the round trip
takes longer than the rest."""

LATE = 1.2
"""A peer that lacks this many times the pieces that its neighbours lack is late, and looks for more
neighbours."""

NEWCOMER_SHARE = 1 / 8
"""A peer that lacks so many more of the pieces than its neighbours came when they had begun. It
requests no more at once than they, or all who were there before would wait for it."""

REQUEST_SECONDS = 0.02
"""On a fast line one request asks for as many pieces as arrive within this time (4 MB at 200 MB/s):
a request for each piece would take about 0.3 ms of computing at both ends together. Below
50 MB/s a request is for one piece of 512 KiB."""

REQUEST_PIECES_MAX = 16
"""Pieces per request at most: 16 such requests fit in one packet of loopback."""

LEAVE_SHARE = 1 / 16
"""Probability, per request, that a lane draws another source though the last one has more: sources
are chosen again as conditions change."""

HEDGE_SECONDS = 0.5
"""Soonest second request for one of the last pieces; else after twice its expected time."""

SILENCE_SECONDS = 1.0
"""After this long a neighbour is asked for a checkpoint that it announced nothing of."""


@dataclass(eq=False)
class Chooser:
    """Chooses pieces and sources for every fetch of one peer."""

    _world: World
    _peer_id: PeerId
    _book: SourceBook
    _have: HaveExchange | None
    _width: Width

    def look(self, job: Job) -> None:
        """Ask the caller of a fetch for the sources that may have the checkpoint."""
        known = {}
        for source in job.sources():
            if source.peer == self._peer_id:
                continue
            name = source_name(source)
            line = job.lines.get(name)
            if line is None:
                line = job.lines[name] = Line(source)
                if self._have is not None and source.peer is not None:
                    line.claim = self._have.claims.of(source.peer, job.digest)
            line.source = source
            line.record = self._book.known(name)
            known[name] = line
        job.known = known
        self.widen(job)

    def widen(self, job: Job) -> None:
        """Set how many pieces to request at once: more if more is missing than at neighbours.

        So all finish nearly together: no uplink falls idle because nobody needs its pieces."""
        if job.held is None:
            return
        pieces = len(job.held.pieces)
        claims = [line.claim for line in job.known.values() if line.claim is not None]
        now = self._world.now()
        lacks = [claim.lacks(pieces, now) for claim in claims]
        # On long and fast lines small pieces spend most of their time in the round trip: so many
        # requests that about `Width.usual` pieces flow at once.
        flowing = int(FLOWING_SHARE * self._width.usual / max(job.flowing, 0.01))
        usual = max(self._width.usual, min(flowing, self._width.most))
        job.per_source = self._width.per_source
        if usual > self._width.usual and job.known:
            # Too few sources for this width: request more from each.
            share = min(-(-usual // len(job.known)), self._width.most // 2)
            job.per_source = max(job.per_source, share)
        if not lacks:
            job.width, job.late = usual, False
            return
        # The median, which neither newcomers nor liars among them move.
        theirs = sorted(lacks)[len(lacks) // 2]
        missing = job.missing.bit_count() + len(job.attempts)
        late = missing / max(theirs, 1.0)
        job.late = late >= LATE
        much = NEWCOMER_SHARE * pieces
        if missing - theirs > much and 4 * theirs > much:  # else they will not miss the uplinks
            late = 1.0
        # Squared, so that a late peer catches up. One that is ahead gives up an eighth at most,
        # since claims may be lies.
        job.width = max(1, 7 * usual // 8, min(round(usual * late * late), self._width.most))

    def next(self, job: Job, last: Line | None, now: float) -> Request | None:
        """The next request for missing pieces, to the last source again if possible.

        None if no source can be asked."""
        if job.held is None:
            return self._next_manifest(job, now)
        if not job.missing or job.scope.cancel_called:
            return None
        # A lane stays with its source: one look at one claim, not at those of all sources.
        able = self._offer(job, last, now) if last is not None and self._stays(job, last) else 0
        if last is not None and able:
            line = last
        else:
            lines = [line for line in job.known.values() if self._offer(job, line, now)]
            if not lines:
                return None
            line = self._choose_claiming(lines)
            able = self._offer(job, line, now)
        # The rarest piece, since a source that leaves takes it along; at random among equals, or
        # all readers would ask for the same one. The pieces after it only fill the request.
        if self._have is not None:
            index = draw(self._have.claims.rarest(job.digest, able), self._world.random)
        else:
            # In order from mirrors: with no other readers, a file's hash keeps up with its pieces.
            index = (able & -able).bit_length() - 1
        count = self._count(job, index, line)
        indices = [index]
        while len(indices) < count and able >> (indices[-1] + 1) & 1:
            indices.append(indices[-1] + 1)
        # Taken without an await since they were offered: other lanes choose from the same bits.
        # `Job.end` gives back what does not arrive.
        for each in indices:
            job.missing ^= 1 << each
        return self._ask_for(job, indices, line, now)

    def _next_manifest(self, job: Job, now: float) -> Request | None:
        if job.found is not None or MANIFEST in job.attempts or MANIFEST in job.landing:
            return None
        lines = [line for line in job.known.values() if self._may_have(job, line, MANIFEST, now)]
        return self._ask_for(job, [MANIFEST], self._choose_claiming(lines), now) if lines else None

    def hedge(self, job: Job, now: float) -> Request | None:
        """A request for one of the last pieces, which takes too long, from a further source."""
        if job.missing or job.spare_at > now:
            return None
        for index, attempts in job.attempts.items():
            # One more only when every running attempt is late: liars that hang cannot use up the
            # attempts, and an honest source has enough time.
            if index in job.landing or max(attempt.hedge_at for attempt in attempts) > now:
                continue
            if job.is_here(index):  # the attempt that brought it is still cleaning up
                continue
            asked = {attempt.request.line.name for attempt in attempts}
            lines = [
                line
                for line in job.known.values()
                if line.name not in asked and self._may_have(job, line, index, now)
            ]
            if lines and job.active < 2 * self._width.most:
                return self._ask_for(job, [index], self._choose(lines), now)
        return None

    def _count(self, job: Job, index: int, line: Line) -> int:
        """How many consecutive pieces one request may ask for."""
        in_time = self._book.bandwidth(line.name) * REQUEST_SECONDS
        pieces = int(in_time / job.reference(index).size_bytes)
        if pieces < 2:
            return 1
        # Towards the end every lane gets its share.
        left = (job.missing.bit_count() + 2) // (2 * self._width.per_source)
        return max(1, min(pieces, left, REQUEST_PIECES_MAX))

    def _stays(self, job: Job, line: Line) -> bool:
        return (
            line.claim is not None
            and self._world.random.random() >= LEAVE_SHARE
            and 2.0 * self._book.bandwidth(line.name) >= job.pace
        )

    def _choose_claiming(self, lines: Sequence[Line]) -> Line:
        """Choose a source that claims pieces if there is one, else one that announces nothing."""
        return self._choose([line for line in lines if line.claim is not None] or lines)

    def _choose(self, lines: Sequence[Line]) -> Line:
        return lines[self._book.choose([line.name for line in lines])]

    def _is_able(self, job: Job, line: Line, now: float) -> bool:
        if line.active >= job.per_source or line.not_before > now:
            return False
        record = line.record
        if record is None:
            record = line.record = self._book.known(line.name)
        return record is None or record.paused_until <= now

    def _offer(self, job: Job, line: Line, now: float) -> int:
        if not self._is_able(job, line, now):
            return 0
        if line.claim is not None:
            return line.claim.of(job.missing)
        return job.missing & ~line.barred if self._is_asked_blindly(job, line, now) else 0

    def _may_have(self, job: Job, line: Line, index: int, now: float) -> bool:
        if not self._is_able(job, line, now):
            return False
        if line.claim is not None:
            return index == MANIFEST or line.claim.has(index)
        if index != MANIFEST and line.barred >> index & 1:
            return False
        return self._is_asked_blindly(job, line, now)

    def _is_asked_blindly(self, job: Job, line: Line, now: float) -> bool:
        if self._have is None or line.source.peer is None:
            return True
        # A neighbour announces a checkpoint once it has some of it. After a while it is asked
        # anyway, since it may have failed to announce it.
        if now - job.started >= SILENCE_SECONDS:
            return True
        return not self._have.claims.announces(line.source.peer)

    def _ask_for(self, job: Job, indices: list[int], line: Line, now: float) -> Request:
        sizes = [job.reference(index).size_bytes for index in indices]
        request = Request(line, now, sum(sizes))
        bandwidth = self._book.bandwidth(line.name)
        expected = 0.0
        for index, size_bytes in zip(indices, sizes, strict=True):
            expected += size_bytes / bandwidth
            hedge_at = now + max(2 * expected, HEDGE_SECONDS)
            attempts = job.attempts.setdefault(index, [])
            attempt = Attempt(index, request, hedge_at, spare=bool(attempts))
            attempts.append(attempt)
            request.attempts.append(attempt)
        line.active += 1
        job.active += 1
        return request
