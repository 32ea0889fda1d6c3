"""Choice of the next source: sampled in proportion to success rate × bandwidth, both averaged.

INTELLECT-2's rule for choosing relays (arXiv 2505.07291): exponential moving averages with
α = 0.3. Every observation raises every source's success rate by 0.01, up to 1, so that a source
that failed is tried again later. A new source is assumed to be as fast as the fastest known."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.shardcast import limits
from swarm.transport import Source
from swarm.world import World
from swarm.world.recent import Recent

SOURCE_HEALING = 0.01
"""Added to every source's success rate per observation, capped at 1 (INTELLECT-2)."""

SOURCE_MEASURED_BYTES_MIN = 64 * 1024
"""Smallest piece that measures bandwidth: the time of a smaller one is mostly latency."""

SOURCE_CORRUPT_SECONDS = 60.0
"""Pause of a source that sent wrong bytes, doubling; transport errors cost less."""

SOURCE_BACKOFF_SECONDS = 0.1
"""Pause after a source's first failure, doubling up to `SOURCE_BACKOFF_SECONDS_MAX`."""

SOURCE_BACKOFF_SECONDS_MAX = 10.0

INFLOW_SECONDS = 1.0
"""Shortest measurement of what arrives from all sources together."""

INFLOW_SLOWER_SMOOTHING = 0.1
"""Weight of a measurement below the average: the sources may have been slow, not the line."""

SOURCES_KNOWN_MAX = 4096
"""Sources whose averages are remembered."""

_CORRUPT_FACTOR = 0.1
"""A corrupt piece multiplies its source's success rate by this."""


def source_name(source: Source) -> str:
    """The name of a source in events and averages: its peer id, or its first address."""
    if source.peer is not None:
        return source.peer
    return source.addresses[0] if source.addresses else "nobody"


@dataclass(slots=True)
class Record:
    """What is known of one source."""

    success: float
    """Averaged success rate, as of `healed_at`."""
    bandwidth: float
    """Averaged bytes per second."""
    healed_at: int
    """Number of observations, of all sources, when `success` was written."""
    measured: bool = False
    """Whether `bandwidth` was ever observed."""
    failures: int = 0
    corruptions: int = 0
    paused_until: float = 0.0


class SourceBook:
    """The record of every source. One per peer, shared by all its fetches."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._records: Recent[str, Record] = Recent(SOURCES_KNOWN_MAX)
        self._observations = 0
        self.inflow = limits.SOURCE_BANDWIDTH_INITIAL
        """Averaged bytes per second of all sources together, while anything is requested."""
        # The running measurement: its start, its bytes, and when the last of them came.
        self._since = self._arrived_at = 0.0
        self._arrived = 0

    def record(self, name: str) -> Record:
        """What is known of a source, from now on remembered."""
        return self._records.of(name, self._newcomer)

    def known(self, name: str) -> Record | None:
        """What is known of a source; None if nothing is remembered."""
        return self.record(name) if name in self._records else None

    def _newcomer(self) -> Record:
        fastest = max(
            (known.bandwidth for known in self._records.values() if known.measured),
            default=limits.SOURCE_BANDWIDTH_INITIAL,
        )
        return Record(1.0, fastest, self._observations)

    def success_rate(self, name: str) -> float:
        """Averaged share of requests that succeeded, plus the healing since; in [0, 1]."""
        return self._healed(self.record(name))

    def _healed(self, record: Record) -> float:
        healed = SOURCE_HEALING * (self._observations - record.healed_at)
        return min(1.0, record.success + healed)

    def bandwidth(self, name: str) -> float:
        """Averaged bytes per second of one request."""
        return self.record(name).bandwidth

    def weight(self, name: str) -> float:
        """Sampling weight of a source, relative to others; never 0."""
        record = self.record(name)
        return max(self._healed(record) * record.bandwidth, 1e-9)

    def choose(self, names: Sequence[str]) -> int:
        """Draw the index of one of `names` (not empty), in proportion to its weight."""
        total = list(itertools.accumulate(map(self.weight, names)))
        drawn = self._world.random.random() * total[-1]
        return bisect.bisect(total, drawn, 0, len(names) - 1)

    def succeeded(self, name: str, size_bytes: int, seconds: float) -> None:
        """Note that a right piece arrived. A small one measures only latency, not bandwidth."""
        record = self._observe(name, 1.0)
        record.failures = 0
        if size_bytes < SOURCE_MEASURED_BYTES_MIN:
            return
        bandwidth = size_bytes / max(seconds, 1e-6)
        if record.measured:
            bandwidth = record.bandwidth + limits.SOURCE_SMOOTHING * (bandwidth - record.bandwidth)
        record.bandwidth = bandwidth
        record.measured = True
        self._measure(size_bytes, seconds)

    def _measure(self, size_bytes: int, seconds: float) -> None:
        now = self._world.now()
        if self._arrived_at < now - seconds:  # nothing else came since it was requested
            self._since, self._arrived = now - seconds, 0
        self._arrived_at = now
        self._arrived += size_bytes
        if now - self._since >= INFLOW_SECONDS:
            measured = self._arrived / (now - self._since)
            faster = measured > self.inflow
            weight = limits.SOURCE_SMOOTHING if faster else INFLOW_SLOWER_SMOOTHING
            self.inflow += weight * (measured - self.inflow)
            self._since, self._arrived = now, 0

    def failed(self, name: str) -> None:
        """Note that a request failed; the source's pause doubles each time."""
        record = self._observe(name, 0.0)
        pause = min(
            SOURCE_BACKOFF_SECONDS * 2.0 ** min(record.failures, 30), SOURCE_BACKOFF_SECONDS_MAX
        )
        record.failures += 1
        record.paused_until = max(record.paused_until, self._world.now() + pause)

    def corrupt(self, name: str) -> None:
        """Note that a piece was wrong: the source's success rate drops, and its pause is long."""
        record = self._observe(name, 0.0)
        record.success *= _CORRUPT_FACTOR
        pause = SOURCE_CORRUPT_SECONDS * 2.0 ** min(record.corruptions, 10)
        record.corruptions += 1
        record.paused_until = self._world.now() + pause

    def given_up(self, name: str, size_bytes: int, seconds: float) -> None:
        """Note that a request was given up after `seconds`, which bounds the source's bandwidth."""
        record = self.record(name)
        bytes_per_second = max(size_bytes, SOURCE_MEASURED_BYTES_MIN) / max(seconds, 1e-6)
        if bytes_per_second < record.bandwidth:
            record.bandwidth += limits.SOURCE_SMOOTHING * (bytes_per_second - record.bandwidth)
            record.measured = True

    def _observe(self, name: str, outcome: float) -> Record:
        record = self.record(name)
        success = self._healed(record)
        self._observations += 1
        healed = success + limits.SOURCE_SMOOTHING * (outcome - success)
        record.success = min(1.0, healed + SOURCE_HEALING)
        record.healed_at = self._observations
        return record
