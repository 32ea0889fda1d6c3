"""Limits on uploads, and the order in which a publisher sends pieces (docs/shardcast.md).

No upload is started while the current ones would keep the uplink busy for `UPLOAD_SECONDS`; further
clients get the answer "busy". The uplink is measured: bytes sent over the time in which anything
was being sent. The publisher of a checkpoint sends no piece twice before it has sent each once: new
pieces reach the network only through its line."""

import functools
import itertools

from swarm.shardcast import limits
from swarm.shardcast.store import CheckpointStore
from swarm.transport import OpenBlob, Refused, Transport
from swarm.world import World

UPLOAD_SECONDS = 12.0
"""Uploads at once keep the uplink busy for about this long: 3 pieces of 32 MiB at 50 Mb/s, 45 at
1 Gb/s. Then each upload runs at about 20 Mb/s, and an average uplink of 200 Mb/s has a few more
uploads than `PARALLEL`."""

START_SHARE = 1 / 4
"""At first uploads keep the uplink busy for this part of the time since the first of them."""

COUNTED_TIMES = 4
"""An upload that takes so many times longer than uploads may keep the uplink busy no longer counts
as one that does. Else three clients that read a byte now and then would keep all others from an
uplink of 50 Mb/s."""

UPLOAD_MEASURED_SECONDS_MIN = 1.0
"""Shortest measurement of the uplink."""

UPLOAD_SLOWER_SMOOTHING = 0.1
"""Weight of a measurement below the average: the uplink may have had too little to send."""

SEEDING_SECONDS = 10.0
"""When no piece has left for the first time for this long, the publisher sends any."""


class Uploads:
    """Starts and counts uploads. One per peer."""

    def __init__(self, world: World, transport: Transport, store: CheckpointStore) -> None:
        self._world = world
        self._transport = transport
        self._store = store
        self.bytes_per_second = limits.SOURCE_BANDWIDTH_INITIAL
        """Averaged measured speed of the uplink."""
        self._is_guess = True
        self._began = 0.0
        """When the uplink was first in use, after it had been idle."""
        self._ended = -UPLOAD_SECONDS
        self._counted: dict[int, tuple[float, int]] = {}
        """Running uploads that count, oldest first: when each began, and its bytes."""
        self._numbers = itertools.count()
        self._active_bytes = 0
        """Bytes of the uploads that count."""
        # The running measurement: its start, bytes sent before it, and bytes sent at which it ends.
        self._since = 0.0
        self._sent = 0
        self._until_sent = 0
        self._left_at = 0.0
        """When a piece was last sent for the first time."""

    def open(self, digest: bytes) -> OpenBlob | None:
        """Open a piece or manifest to send; None if it is missing. Raises `Refused` 503 if busy."""
        store = self._store
        now = self._world.now()
        while self._counted:
            oldest = next(iter(self._counted))
            began, size_bytes = self._counted[oldest]
            usual = max(self._seconds(began), size_bytes / self.bytes_per_second)
            if now - began < COUNTED_TIMES * usual:
                break
            self._stop_counting(oldest)
        if not self._counted and now - self._ended >= UPLOAD_SECONDS:
            self._began = now
        busy = self._active_bytes >= self._seconds(now) * self.bytes_per_second
        if busy and store.blobs.has(digest):
            raise Refused(503, "busy")
        if store.is_seeding and not self._may_leave(digest):
            raise Refused(503, "busy: other pieces leave first")
        blob = store.blobs.open(digest)
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

    def is_idle(self) -> bool:
        """Whether the uploads that count are fewer than a quarter of those that there may be."""
        room = self._seconds(self._world.now()) * self.bytes_per_second
        return 4 * self._active_bytes < room

    def _seconds(self, now: float) -> float:
        """For how long uploads may keep the uplink busy: less at first, so that the first pieces
        arrive, and are passed on, sooner."""
        return max(1.0, min(UPLOAD_SECONDS, START_SHARE * (now - self._began)))

    def _stop_counting(self, number: int) -> None:
        _, size_bytes = self._counted.pop(number, (0.0, 0))
        self._active_bytes -= size_bytes
        self._ended = self._world.now()

    def _may_leave(self, digest: bytes) -> bool:
        """Whether a piece may be sent: all of its checkpoint were sent once, or this one never."""
        now = self._world.now()
        left = self._store.leave(digest)
        if left or now - self._left_at < SEEDING_SECONDS:
            if left:
                self._left_at = now
            return left
        # No client asks for the rest: better any piece than none.
        self._store.end_seeding(digest)
        return True

    def _release(self, number: int, blob: OpenBlob) -> None:
        blob.release()
        self._stop_counting(number)
        sent = self._transport.traffic.sent
        if sent < self._until_sent:
            return
        now = self._world.now()
        seconds = now - self._since
        if seconds < UPLOAD_MEASURED_SECONDS_MIN:
            return
        measured = (sent - self._sent) / seconds
        faster = measured > self.bytes_per_second
        weight = limits.SOURCE_SMOOTHING if faster else UPLOAD_SLOWER_SMOOTHING
        if faster and self._is_guess:
            weight = 1.0
        self._is_guess = False
        self.bytes_per_second += weight * (measured - self.bytes_per_second)
        self._measure_from(now, self._active_bytes)

    def _measure_from(self, now: float, active_bytes: int) -> None:
        self._since = now
        self._sent = self._transport.traffic.sent
        self._until_sent = self._sent + 2 * active_bytes
