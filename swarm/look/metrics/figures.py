"""The figures of one peer for Prometheus: counters, gauges and histograms, fed by its events.

docs/metrics.md lists them. Labels have few values, all from this program or the peer's settings:
never a peer id, a hash or a text that another peer chose, because each value costs memory here and
in Prometheus for good.
"""

from __future__ import annotations

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
    values: Sequence[str] = ()
    """Values of the label; another one counts as `other`, and an empty one not at all."""


OUTCOMES = ("accepted", "refused", "quarantined")
CHECKS = (*REFUSALS, OTHER)

TRAINING = {
    "reward": "Mean reward of the step's rollouts.",
    "completion_length": "Mean tokens per completion.",
    "entropy": "Mean entropy of the policy per token, in nats.",
    "kl_generation": "KL divergence between the generating policy and the trained one.",
    "repetition": "Share of runs of four tokens that occurred in the same completion before.",
    "truncated": "Share of completions that the length limit cut off.",
    "gradient_norm": "Norm of the gradient before clipping.",
    "staleness": "Steps between the oldest policy in the batch and this step.",
    "step_seconds": "Time of the step, waiting included.",
    "idle_seconds": "Time in which the step waited for rollouts and their checks.",
    "evaluation": "Reward on held-out tasks.",
}
"""Gauges of the newest step, by field of the event."""

ANY = [
    Fed("newest", "swarm_policy", "Policy that the peer holds; -1: none.", "peer.status", "policy"),
    Fed("newest", "swarm_step", "Step that the peer works on; -1: none.", "peer.status", "step"),
    Fed(
        "times",
        "swarm_checkpoint_fetch_seconds",
        "From the start of fetching a checkpoint until it is here.",
        "shardcast.checkpoint_complete",
    ),
    Fed(
        "count",
        "swarm_child_deaths_total",
        "Child processes that ended by themselves.",
        "compute.child_died",
    ),
]
MADE, RECEIPT, VERDICT = "inference.submission_made", "inference.receipt", "validator.verdict"
OF_ROLE: dict[str, list[Fed]] = {
    "inference": [
        Fed(
            "newest",
            "swarm_tokens_per_second",
            "Rate of the last submission; 0 after 30 s without one or far too long within one.",
            "peer.status",
            "tokens_per_second",
        ),
        Fed("sum", "swarm_tokens_generated_total", "Tokens generated.", MADE, "tokens"),
        Fed("times", "swarm_generation_seconds", "Time to generate a submission.", MADE),
        Fed(
            "count",
            "swarm_deliveries_failed_total",
            "Reports that a validator could not be given a submission.",
            "inference.delivery_failed",
        ),
        Fed(
            "sorted",
            "swarm_receipts_total",
            "Receipts, by outcome.",
            RECEIPT,
            "outcome",
            "outcome",
            OUTCOMES,
        ),
        Fed("sum", "swarm_groups_credited_total", "Groups credited.", RECEIPT, "groups"),
        Fed(
            "newest",
            "swarm_device_busy_ratio",
            "Share of the time in which the device generated.",
            "inference.device",
            "busy",
        ),
    ],
    "validator": [
        Fed(
            "sorted",
            "swarm_verdicts_total",
            "Verdicts, by outcome.",
            VERDICT,
            "outcome",
            "outcome",
            OUTCOMES,
        ),
        Fed(
            "sorted",
            "swarm_verdicts_failed_total",
            "Verdicts on work that failed a check, by check.",
            VERDICT,
            "failed",
            "check",
            CHECKS,
        ),
        Fed("times", "swarm_judging_seconds", "Time to judge a submission.", VERDICT),
        Fed(
            "count",
            "swarm_submissions_turned_down_total",
            "Reports of submissions that were not even checked.",
            "validator.turned_down",
        ),
    ],
    "trainer": [
        Fed(
            "count",
            "swarm_steps_trained_total",
            "Steps trained by this process.",
            "trainer.step_trained",
        ),
        *(
            Fed("newest", f"swarm_training_{name}", words, "trainer.step_trained", name)
            for name, words in TRAINING.items()
        ),
    ],
    "replica": [
        Fed("newest", "swarm_outer_round", "Round merged last.", "outer.merged", "round"),
        Fed("times", "swarm_outer_merge_seconds", "Time to merge a round.", "outer.merged"),
        Fed("newest", "swarm_outer_loss", "Loss on data held back.", "outer.measured", "loss"),
    ],
}


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
        for fed in [*ANY, *(each for role in sorted(set(roles)) for each in OF_ROLE.get(role, ()))]:
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
        """A gauge; without labels it is not a number until it is set."""
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
        """Make the gauge that deploy/prometheus/alerts.yml watches."""
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
