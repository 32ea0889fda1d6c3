"""One submission's way through the swarm, from the logs that its peers wrote (`--json-logs`).

The events that name a submission become spans. The trace's id is the beginning of the submission's
hash, so the spans of all peers join although no message carries a trace."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from blake3 import blake3

from swarm.data import beside
from swarm.errors import file_errors
from swarm.look.prefixes import resolve
from swarm.terminal.untrusted import printable

TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8
"""As in the W3C's trace context, and in OTLP."""

_SPANS = beside(__file__, dict[str, dict[str, str]])
LASTING, MOMENTS = _SPANS["lasting"], _SPANS["moments"]
"""Spans by the event that ends them, from `trace.toml`: those of the length `seconds`, and those
since the event before them."""

SHOWN = ("step", "number", "policy", "tokens", "validator", "worker", "outcome", "failed", "by")
"""Fields of events that a span keeps."""


@dataclass(frozen=True)
class Span:
    """A part of the way, on one peer."""

    name: str
    event: str
    peer: str
    began: float
    """Wall time in seconds, by the peer's own clock."""
    ended: float
    attributes: dict[str, Any] = field(default_factory=dict)


LINE_BYTES_MAX = 1 << 20
"""Longest line of a log that is read."""


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events in a log that `--json-logs` wrote, or in all logs of a folder.

    Skips lines that are no events: a log may end within one. Raises `UserError`."""
    with file_errors(f"--logs {path}"):
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        for file in files:
            with file.open("rb") as stream:
                while line := stream.readline(LINE_BYTES_MAX):
                    try:
                        event = json.loads(line)
                    except (ValueError, RecursionError):
                        continue
                    if isinstance(event, dict) and isinstance(event.get("event"), str):
                        yield event


def trace_of(events: Iterable[Mapping[str, Any]], prefix: str) -> tuple[str, list[Span]]:
    """The whole hash of a submission, and its spans in order of their ends; raises `UserError`.

    Clocks of different machines may differ; a span never begins after its end."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    short = prefix.lower().removeprefix("…")
    for event in events:
        for submission in submissions_of(event):
            if submission.startswith(short) or submission.endswith(short):
                found.setdefault(submission, []).append(event)
    submission = resolve(prefix.lower(), found, "submission", "the folder of logs")
    spans: list[Span] = []
    for event in sorted(found[submission], key=lambda each: float(each["time"])):
        spans.append(span_of(event, spans[-1].ended if spans else None))
    return submission, spans


def submissions_of(event: Mapping[str, Any]) -> list[str]:
    """The hashes that an event of a submission's way names; empty for any other event."""
    if event["event"] not in LASTING and event["event"] not in MOMENTS:
        return []
    if not (_is_number(event.get("time")) and isinstance(event.get("peer"), str)):
        return []
    several = event.get("submissions")
    named = several if isinstance(several, list) else [event.get("submission")]
    return [submission for submission in named if isinstance(submission, str)]


def span_of(event: Mapping[str, Any], before: float | None) -> Span:
    """The span that an event ends; `before` is the time of the submission's event before it."""
    ended = float(event["time"])
    seconds = event.get("seconds")
    if event["event"] in LASTING:
        began = ended - max(0.0, float(seconds)) if _is_number(seconds) else ended
        name = LASTING[event["event"]]
    else:
        began, name = (ended if before is None else before), MOMENTS[event["event"]]
    kept = {key: event[key] for key in SHOWN if isinstance(event.get(key), (str, int, float))}
    return Span(name, event["event"], event["peer"], began, ended, kept)


def ids(submission: str, span: Span) -> tuple[str, str]:
    """Trace id and span id in hex. They depend on the event alone, so that a log and a peer that
    sends its spans itself have the same."""
    identity = f"{submission} {span.peer} {span.event} {span.ended}"
    span_id = blake3(identity.encode()).hexdigest()[: 2 * SPAN_ID_BYTES]
    return submission[: 2 * TRACE_ID_BYTES], span_id


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12


def trace_lines(submission: str, spans: list[Span]) -> list[str]:
    """The way as a table: when each hop ended after the first began, and how long it took."""
    start = min(span.began for span in spans)
    lines = [f"submission {submission}", f"{'at':>9} {'took':>9}  what"]
    for span in spans:
        at, took = span.ended - start, span.ended - span.began
        told = ", ".join(
            f"{key} {printable(str(value), 60)}"
            for key, value in span.attributes.items()
            if value != "" and key not in ("validator", "worker", "by")
        )
        lines.append(
            f"{at:8.3f}s {took:8.3f}s  {span.name} by …{printable(span.peer[-8:])}"
            + (f" ({told})" if told else "")
        )
    return lines


def as_otlp(submission: str, spans: list[Span]) -> dict[str, Any]:
    """The spans as OTLP/JSON: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding"""
    by_peer: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        trace_id, span_id = ids(submission, span)
        by_peer.setdefault(span.peer, []).append(
            {
                "traceId": trace_id,
                "spanId": span_id,
                "name": span.name,
                "kind": 1,
                "startTimeUnixNano": str(int(span.began * 1e9)),
                "endTimeUnixNano": str(int(span.ended * 1e9)),
                "attributes": [
                    _attribute(f"swarm.{key}", value) for key, value in span.attributes.items()
                ],
            }
        )
    return {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": [
                        _attribute("service.name", "swarm"),
                        _attribute("service.instance.id", peer),
                    ]
                },
                "scopeSpans": [{"scope": {"name": "swarm"}, "spans": own}],
            }
            for peer, own in by_peer.items()
        ]
    }


def _attribute(key: str, value: Any) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": printable(str(value))}}
