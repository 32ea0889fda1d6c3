"""The figures of one peer for Prometheus: counters, gauges and histograms, fed by its events.

docs/metrics.md lists them. Labels have few values, all from this program or the peer's settings:
never a peer id, a hash or a text that another peer chose, because each value costs memory here and
in Prometheus for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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
from swarm.look.refusals import REFUSALS
from swarm.transport import Reachability, Traffic
from swarm.version import __version__

Handler = Callable[[Mapping[str, Any]], None]
"""Takes the fields of one event."""

EVENT_NAMES_MAX = 512
"""Names of events counted by themselves: the program has about 180, packages may add theirs."""

OTHER = "other"
"""Value of a label in place of one that is not known."""

OUTCOMES = ("accepted", "refused", "quarantined")
CHECKS = (*REFUSALS, OTHER)
ALARMS = ("reward", "entropy", "gradient_norm", "clipped_share", "skipped_share", OTHER)

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Upper bounds of the histograms' buckets: a demo's submission takes 50 ms, a large one minutes."""


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
        about = self.gauge("swarm_peer_info", "1; the labels tell what runs.", "version", "roles")
        about.labels(__version__, ",".join(sorted(set(roles)))).set(1)
        self._events = self.counter("swarm_events_total", "Events, by name.", "event")
        _any_peer(self)
        for role in sorted(set(roles) & set(_BY_ROLE)):
            _BY_ROLE[role](self)

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
        self.gauge("swarm_ready", "1 while the peer takes part in its run.").set_function(ready)
        self.gauge("swarm_connected_peers", "Peers with a live connection.").set_function(peers)

    def on(self, name: str, handler: Handler) -> None:
        """Call a handler at each event of one name."""
        self.handlers.setdefault(name, []).append(handler)

    def counter(self, name: str, words: str, *labels: str) -> Counter:
        self.labels[name] = labels
        return Counter(name, words, labels, registry=self.registry)

    def gauge(self, name: str, words: str, *labels: str) -> Gauge:
        """A gauge; without labels it is not a number until it is set."""
        self.labels[name] = labels
        made = Gauge(name, words, labels, registry=self.registry)
        if not labels:
            made.set(math.nan)
        return made

    def seconds(self, name: str, words: str) -> Histogram:
        return Histogram(name, words, buckets=SECONDS, registry=self.registry)

    def counts(self, event: str, name: str, words: str, field: str = "") -> None:
        """Make a counter of events, or of the sum of one of their fields."""
        made = self.counter(name, words)
        self.on(event, lambda f: made.inc(max(0, f[field]) if field else 1))

    def shows(self, event: str, field: str, name: str, words: str, until: str = "") -> None:
        """Make a gauge with the newest value of an event's field, which may be missing.

        The event `until` makes it no number again.
        """
        made = self.gauge(name, words)
        if until:
            self.on(until, lambda _: made.set(math.nan))
        self.on(event, lambda f: made.set(f[field]) if f.get(field) is not None else None)

    def marks(
        self, event: str, field: str, name: str, words: str, label: str, values: Iterable[str]
    ) -> None:
        """Make a gauge that is 1 at the newest value of a field, and 0 at its other values."""
        made = self.gauge(name, words, label)
        known = list(values)
        for value in known:
            made.labels(value).set(0)

        def mark(fields: Mapping[str, Any]) -> None:
            for value in known:
                made.labels(value).set(value == fields[field])

        self.on(event, mark)

    def times(self, event: str, name: str, words: str) -> None:
        """Make a histogram of an event's field `seconds`."""
        made = self.seconds(name, words)
        self.on(event, lambda f: made.observe(f["seconds"]))

    def sorts(
        self, event: str, field: str, name: str, words: str, label: str, values: Iterable[str]
    ) -> None:
        """Make a counter of events by the value of a field; an empty value counts nothing."""
        made = self.counter(name, words, label)
        known = dict.fromkeys(values)
        for value in known:
            made.labels(value)  # 0 from the start, so that the first event is a rise
        self.on(
            event,
            lambda f: (
                made.labels(f[field] if f[field] in known else OTHER).inc() if f[field] else None
            ),
        )


class _Moved(Collector):
    """Collects the bytes that a peer has moved."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        for word, count in (("sent", self._traffic.sent), ("received", self._traffic.received)):
            text = f"Bytes of checkpoints and submissions {word}."
            yield CounterMetricFamily(f"swarm_blob_{word}_bytes", text, value=count)


# --- the figures of each role --------------------------------------------------------------------


def _any_peer(to: Figures) -> None:
    shown = "peer.status"
    to.shows(shown, "policy", "swarm_policy", "Policy that the peer holds; -1: none.")
    to.shows(shown, "step", "swarm_step", "Step that the peer works on; -1: none.")
    to.marks(
        "peer.status",
        "reachability",
        "swarm_reachability",
        "1 at how other peers reach this one.",
        "reachability",
        [each.value for each in Reachability],
    )
    to.times(
        "shardcast.checkpoint_complete",
        "swarm_checkpoint_fetch_seconds",
        "From the start of fetching a checkpoint until it is here.",
    )
    to.counts(
        "compute.child_died",
        "swarm_child_deaths_total",
        "Child processes that ended by themselves.",
    )


def _relay(to: Figures) -> None:
    to.sorts(
        "relay.limit_reached",
        "limit",
        "swarm_relay_limits_total",
        "Reports that a carried connection reached a limit, by limit.",
        "limit",
        ("bytes", "time", "circuits per peer"),
    )


def _inference(to: Figures) -> None:
    made = "inference.submission_made"
    words = "Rate of the last submission; 0 after 30 s without one or far too long within one."
    to.shows("peer.status", "tokens_per_second", "swarm_tokens_per_second", words)
    to.counts(made, "swarm_tokens_generated_total", "Tokens generated.", "tokens")
    to.times(made, "swarm_generation_seconds", "Time to generate one submission.")
    to.counts(
        "inference.submission_delivered",
        "swarm_submissions_delivered_total",
        "Submissions that a validator acknowledged.",
    )
    to.counts(
        "inference.delivery_failed",
        "swarm_deliveries_failed_total",
        "Reports that a validator could not be given a submission.",
    )
    receipt = "inference.receipt"
    to.sorts(
        receipt, "outcome", "swarm_receipts_total", "Receipts, by outcome.", "outcome", OUTCOMES
    )
    to.sorts(
        receipt,
        "failed",
        "swarm_receipts_failed_total",
        "Receipts of work that failed a check, by check.",
        "check",
        CHECKS,
    )
    to.counts(receipt, "swarm_groups_credited_total", "Groups credited.", "groups")
    to.counts(receipt, "swarm_completions_credited_total", "Completions credited.", "completions")
    to.shows(
        "inference.device",
        "busy",
        "swarm_device_busy_ratio",
        "Share of the time in which the device generated.",
    )


def _validator(to: Figures) -> None:
    verdict = "validator.verdict"
    to.sorts(
        verdict, "outcome", "swarm_verdicts_total", "Verdicts, by outcome.", "outcome", OUTCOMES
    )
    to.sorts(
        verdict,
        "failed",
        "swarm_verdicts_failed_total",
        "Verdicts on work that failed a check, by check.",
        "check",
        CHECKS,
    )
    to.times(verdict, "swarm_judging_seconds", "Time to judge one submission.")
    to.counts(
        "validator.turned_down",
        "swarm_submissions_turned_down_total",
        "Reports of submissions that were not even checked.",
    )


TRAINING = {
    "reward": "Mean reward of the step's rollouts.",
    "completion_length": "Mean tokens per completion.",
    "entropy": "Mean entropy of the policy per token, in nats.",
    "kl_generation": "KL divergence between the generating policy and the trained one.",
    "gradient_norm": "Norm of the gradient before clipping.",
    "learning_rate": "Learning rate.",
    "staleness": "Steps between the oldest policy in the batch and this step.",
    "keep_rate": "Share of accepted groups that have a learning signal.",
    "step_seconds": "Time of the step, waiting included.",
    "idle_seconds": "Time in which the step waited for rollouts and their checks.",
}
"""Gauges of the newest step, by field of the event."""


STANDING_BY = {
    "age_seconds": "Age of the trainer's newest state that this standby has.",
    "bytes": "Size of that state's bundle.",
    "steps_behind": "Steps of the run since that state, which a takeover would lose.",
}
"""Gauges of a standby, by field of the event; not numbers on a trainer."""


def _trainer(to: Figures) -> None:
    trained = "trainer.step_trained"
    to.counts(trained, "swarm_steps_trained_total", "Steps trained by this process.")
    for field, words in TRAINING.items():
        to.shows(trained, field, f"swarm_training_{field}", words)
    to.shows(trained, "evaluation", "swarm_training_evaluation", "Reward on held-out tasks.")
    to.shows(
        "trainer.checkpoint_published", "step", "swarm_policy_published", "Policy published last."
    )
    to.sorts("trainer.alarm", "sign", "swarm_alarms_total", "Alarms, by sign.", "sign", ALARMS)
    to.counts("trainer.rolled_back", "swarm_rollbacks_total", "Returns to an earlier state.")
    for field, words in STANDING_BY.items():
        name = f"swarm_standby_{field}"
        to.shows("standby.standing_by", field, name, words, until="standby.unpacked")


def _replica(to: Figures) -> None:
    merged = "outer.merged"
    to.shows(merged, "round", "swarm_outer_round", "Round merged last.")
    to.shows(
        merged, "tokens", "swarm_outer_tokens", "Tokens that its contributions had trained on."
    )
    to.times(merged, "swarm_outer_merge_seconds", "Time to fetch and merge a round.")
    to.shows("outer.measured", "loss", "swarm_outer_loss", "Loss on the sequences held back.")


_BY_ROLE: dict[str, Callable[[Figures], None]] = {
    "inference": _inference,
    "validator": _validator,
    "trainer": _trainer,
    "replica": _replica,
    "relay": _relay,
}
