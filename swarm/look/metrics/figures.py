"""The figures of one peer for Prometheus: counters, gauges and histograms, fed by its events.

docs/metrics.md lists them. Labels have few values, of this program or its settings: never a peer
id, a hash or another peer's text, because each value costs memory, in Prometheus for good."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from swarm.data import beside
from swarm.events import Event
from swarm.look.alarms.raising import CATALOGUE
from swarm.look.refusals import REFUSALS
from swarm.transport import Traffic
from swarm.version import __version__

Handler = Callable[[Mapping[str, Any]], None]
"""Takes the fields of one event."""

EVENT_NAMES_MAX = 512
"""Names of events counted by themselves: the program has about 180, packages may add theirs."""

OTHER = "other"
"""Value of a label in place of one that is not known."""

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Upper bounds of the histograms' buckets: a demo's submission takes 50 ms, a large one minutes."""


@dataclass(frozen=True)
class Fed:
    """A figure that one kind of event feeds."""

    kind: Literal["count", "sum", "newest", "times", "sorted"]
    """A counter of events, or of the sum of a field; a gauge with the newest value of a field; a
    histogram of the field `seconds`; a counter by the value of a field."""
    name: str
    words: str
    event: str
    field: str = ""
    label: str = ""
    values: Sequence[str] = (*REFUSALS, OTHER)
    """Values of the label; another one counts as `other`, and an empty one not at all."""


FIGURES = beside(__file__, dict[str, list[Fed]])
"""By role, those of every peer under `any`, from `figures.toml`."""


class Figures:
    """Event sink that keeps the figures of a peer with these roles."""

    def __init__(self, roles: Sequence[str]) -> None:
        # Else each counter has a second series, which nothing reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.handlers: dict[str, list[Handler]] = {}
        self.labels: dict[str, tuple[str, ...]] = {}
        """Names of the labels of each figure that has some."""
        self._names: set[str] = set()
        about = self._gauge("swarm_peer_info", "1; the labels tell what runs.", "version", "roles")
        about.labels(__version__, ",".join(sorted(set(roles)))).set(1)
        self._events = self._counter("swarm_events_total", "Events, by name.", "event")
        self._show_alarms()
        for fed in (
            each for role in ["any", *sorted(set(roles))] for each in FIGURES.get(role, ())
        ):
            self.handlers.setdefault(fed.event, []).append(self._made(fed))

    def __call__(self, event: Event) -> None:
        known = event.name in self._names or len(self._names) < EVENT_NAMES_MAX
        if known:
            self._names.add(event.name)
        self._events.labels(event.name if known else OTHER).inc()
        for handler in self.handlers.get(event.name, ()):
            handler(event.fields)

    def watch(
        self, traffic: Traffic, *, ready: Callable[[], bool], peers: Callable[[], int]
    ) -> None:
        """Add what is read at each scrape: bytes moved, readiness, and connected peers."""
        self.registry.register(_Moved(traffic))
        self._gauge("swarm_ready", "1 while the peer takes part in its run.").set_function(ready)
        self._gauge("swarm_connected_peers", "Peers with a live connection.").set_function(peers)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        self.labels[name] = labels
        return Counter(name, words, labels, registry=self.registry)

    def _gauge(self, name: str, words: str, *labels: str) -> Gauge:
        self.labels[name] = labels
        made = Gauge(name, words, labels, registry=self.registry)
        if not labels:
            made.set(math.nan)
        return made

    def _made(self, fed: Fed) -> Handler:
        """Make a figure; returns what feeds it."""
        name, words, field = fed.name, fed.words, fed.field
        if fed.kind == "count":
            events = self._counter(name, words)
            return lambda _: events.inc()
        if fed.kind == "sum":
            total = self._counter(name, words)
            return lambda f: total.inc(max(0, f[field]))
        if fed.kind == "times":
            times = Histogram(name, words, buckets=SECONDS, registry=self.registry)
            return lambda f: times.observe(f["seconds"])
        if fed.kind == "newest":
            newest = self._gauge(name, words)
            return lambda f: newest.set(f[field]) if f.get(field) is not None else None
        counter = self._counter(name, words, fed.label)
        for value in fed.values:
            counter.labels(value)  # 0 from the start, so that the first event is a rise

        def count(fields: Mapping[str, Any]) -> None:
            if value := fields[field]:
                counter.labels(value if value in fed.values else OTHER).inc()

        return count

    def _show_alarms(self) -> None:
        shown = self._gauge("swarm_alarm", "1 while it is raised.", "alarm", "severity")
        for name, kind in CATALOGUE.items():
            shown.labels(name, kind.severity).set(0)

        def set_to(value: int) -> Handler:
            return lambda f: shown.labels(f["alarm"], f["severity"]).set(value)

        self.handlers = {"alarm.raised": [set_to(1)], "alarm.cleared": [set_to(0)]}


class _Moved(Collector):
    """Collects the bytes that a peer has moved."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        for word, count in (("sent", self._traffic.sent), ("received", self._traffic.received)):
            text = f"Bytes of checkpoints and submissions {word}."
            yield CounterMetricFamily(f"swarm_blob_{word}_bytes", text, value=count)
