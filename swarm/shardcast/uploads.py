"""How much this peer sends at once, and what the first holder of a checkpoint sends first.

The number of uploads follows the uplink: no more is begun while what is being sent would keep the
uplink busy for `UPLOAD_SECONDS`. Further clients get the answer "busy", and meanwhile ask other
sources. So a fast line feeds many and a slow one few, every upload goes about equally fast, and no
client waits long for a piece. An upload that takes several times as long is no longer counted: its
reader is slow, or wants to keep others out. The uplink is measured: bytes sent over
the time in which anything was being sent.

The publisher of a checkpoint sends no piece twice before each has left it once: its line is the
only way for new pieces into the network.
"""

from __future__ import annotations

import functools
import itertools

from swarm.shardcast import limits
from swarm.shardcast.store import CheckpointStore
from swarm.transport import OpenBlob, Refused, Transport
from swarm.world import World

UPLOAD_SECONDS = 12.0
"""A peer sends at once what keeps its uplink busy for this long: 3 pieces of 32 MiB at 50 Mb/s, 45
at 1 Gb/s, so that each upload goes at about 20 Mb/s when all are in use, and there are a few more
than `PARALLEL` for each peer of an average uplink of 200 Mb/s."""

UPLOAD_COUNTED_SECONDS = 4 * UPLOAD_SECONDS
"""An upload that takes longer no longer counts as one that keeps the uplink busy: three readers of
a byte now and then would else keep everybody else from an uplink of 50 Mb/s."""

UPLOAD_MEASURED_SECONDS_MIN = 1.0
"""The uplink is measured over no less."""

UPLOAD_SLOWER_SMOOTHING = 0.1
"""Weight of a measurement below the average: the uplink may just not have been asked for more."""

SEEDING_SECONDS = 10.0
"""When no piece has left for the first time for this long, the publisher sends any."""


class Uploads:
    """Begins and counts uploads. One per peer."""

    def __init__(self, world: World, transport: Transport, store: CheckpointStore) -> None:
        self._world = world
        self._transport = transport
        self._store = store
        self.bytes_per_second = limits.SOURCE_BANDWIDTH_INITIAL
        """The uplink, as measured so far."""
        self._counted: dict[int, tuple[float, int]] = {}
        """What is being sent and counts, oldest first: when it began, and its bytes."""
        self._numbers = itertools.count()
        self._active_bytes = 0
        """Of what counts."""
        # A measurement: since when, sent by then, and sent at its end.
        self._since = 0.0
        self._sent = 0
        self._until_sent = 0
        self._left_at = 0.0
        """When a piece last left for the first time."""

    def open(self, digest: bytes) -> OpenBlob | None:
        """A piece or manifest to send, None if it is not here; raises `Refused` 503 when busy."""
        store = self._store
        now = self._world.now()
        self._leave_out_the_slow(now)
        busy = self._active_bytes >= UPLOAD_SECONDS * self.bytes_per_second
        if busy and store.has(digest):
            raise Refused(503, "busy")
        if store.seeding.active and not self._may_leave(digest):
            raise Refused(503, "busy: other pieces leave first")
        blob = store.open(digest)
        if blob is None:
            return None
        if not self._active_bytes:
            self._measure_from(now, blob.size_bytes)
        number = next(self._numbers)
        self._counted[number] = (now, blob.size_bytes)
        self._active_bytes += blob.size_bytes
        return OpenBlob(
            blob.path, blob.offset, blob.size_bytes, functools.partial(self._release, number, blob)
        )

    def _leave_out_the_slow(self, now: float) -> None:
        while self._counted:
            oldest = next(iter(self._counted))
            if now - self._counted[oldest][0] < UPLOAD_COUNTED_SECONDS:
                return
            self._stop_counting(oldest)

    def _stop_counting(self, number: int) -> None:
        _, size_bytes = self._counted.pop(number, (0.0, 0))
        self._active_bytes -= size_bytes

    def _may_leave(self, digest: bytes) -> bool:
        """Whether each piece of the checkpoint has left once, or this one has not."""
        now = self._world.now()
        left = self._store.seeding.leave(digest)
        if left or now - self._left_at < SEEDING_SECONDS:
            if left:
                self._left_at = now
            return left
        # No client asks for the rest: better any piece than none.
        self._store.seeding.end(digest)
        return True

    def _release(self, number: int, blob: OpenBlob) -> None:
        blob.release()
        self._stop_counting(number)
        sent = self._transport.bulk_bytes().sent
        if sent < self._until_sent:
            return
        now = self._world.now()
        seconds = now - self._since
        if seconds < UPLOAD_MEASURED_SECONDS_MIN:
            return
        measured = (sent - self._sent) / seconds
        faster = measured > self.bytes_per_second
        weight = limits.SOURCE_SMOOTHING if faster else UPLOAD_SLOWER_SMOOTHING
        self.bytes_per_second += weight * (measured - self.bytes_per_second)
        self._measure_from(now, self._active_bytes)

    def _measure_from(self, now: float, active_bytes: int) -> None:
        self._since = now
        self._sent = self._transport.bulk_bytes().sent
        self._until_sent = self._sent + 2 * active_bytes
