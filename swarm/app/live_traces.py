"""A peer's spans, sent to an OpenTelemetry collector as they end (`[traces]`).

The mapping of events to spans is that of `swarm trace`. OpenTelemetry's batch processor sends them
from a thread of its own, out of a bounded queue, so that a dead collector costs the peer nothing.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import trio

from swarm.app.alarms.settings import host_of, is_local
from swarm.app.trace import Span, ids, span_of, submissions_of
from swarm.errors import UserError
from swarm.events import Event, Events, Rationed, to_json
from swarm.settings import TraceSettings
from swarm.untrusted import printable

QUEUE_SPANS_MAX, BATCH_SPANS_MAX = 2048, 512

BATCH_SECONDS = 5.0
"""Longest time that a span waits for others."""

REQUEST_SECONDS = 10.0
"""Deadline of one batch, with its repetitions."""

STOP_SECONDS = 3.0
"""Time for the rest of the queue when the peer stops."""

SUBMISSIONS_MAX = 4096
"""Submissions whose last event is remembered; the oldest is forgotten first."""


def check(settings: TraceSettings) -> None:
    """Raise `UserError` for an endpoint that cannot work, or without the extra `traces`."""
    if not settings.endpoint:
        return
    parts = urlsplit(settings.endpoint)
    local = parts.scheme == "http" and is_local(parts.hostname)
    if not parts.hostname or not (parts.scheme == "https" or local):
        raise UserError(
            f"[traces]: endpoint at {host_of(settings.endpoint)!r} is neither https nor on this "
            "machine; use https://…"
        )
    _library("exporter.otlp.proto.http.trace_exporter")


@asynccontextmanager
async def tracing(settings: TraceSettings, events: Events) -> AsyncIterator[None]:
    """Send the spans of a peer's events inside the block, if an endpoint is set."""
    if not settings.endpoint:
        yield
        return
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False  # the event below is the one line that a dead collector gets
    logger.addHandler(logging.NullHandler())
    exporter = Exporter(settings.endpoint, events)
    processor = _library("sdk.trace.export").BatchSpanProcessor(
        exporter,
        max_queue_size=QUEUE_SPANS_MAX,
        schedule_delay_millis=BATCH_SECONDS * 1000,
        max_export_batch_size=BATCH_SPANS_MAX,
    )
    events.add_sink(_Spans(processor))
    try:
        yield
    finally:
        with trio.move_on_after(STOP_SECONDS, shield=True):
            await trio.to_thread.run_sync(processor.shutdown, abandon_on_cancel=True)
        exporter.shutdown()  # an abandoned thread of the processor tries no further


class _Spans:
    """Event sink that turns the events of submissions into OpenTelemetry's spans."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._before: OrderedDict[str, float] = OrderedDict()

    def __call__(self, event: Event) -> None:
        if not {"submission", "submissions"} & event.fields.keys():
            return
        # As `swarm trace` reads it from the log: rounded times, bytes as hex.
        record = json.loads(to_json(event))
        for submission in submissions_of(record):
            span = span_of(record, self._before.pop(submission, None))
            self._before[submission] = span.ended
            if len(self._before) > SUBMISSIONS_MAX:
                self._before.popitem(last=False)
            self._processor.on_end(_readable(submission, span))


def _readable(submission: str, span: Span) -> Any:
    api, sdk = _library("trace"), _library("sdk.trace")
    trace_id, span_id = (int(each, 16) for each in ids(submission, span))
    return sdk.ReadableSpan(
        span.name,
        context=api.SpanContext(trace_id, span_id, False, api.TraceFlags(api.TraceFlags.SAMPLED)),
        resource=_library("sdk.resources").Resource(
            {"service.name": "swarm", "service.instance.id": span.peer}
        ),
        attributes={
            f"swarm.{key}": printable(value) if isinstance(value, str) else value
            for key, value in span.attributes.items()
        },
        start_time=int(span.began * 1e9),
        end_time=int(span.ended * 1e9),
        instrumentation_scope=_library("sdk.util.instrumentation").InstrumentationScope("swarm"),
    )


class Exporter:
    """OpenTelemetry's OTLP/HTTP exporter; its first failure after a success becomes an event."""

    def __init__(self, endpoint: str, events: Events, seconds: float = REQUEST_SECONDS) -> None:
        module = _library("exporter.otlp.proto.http.trace_exporter")
        self._exporter = module.OTLPSpanExporter(endpoint, timeout=seconds)
        self._success = _library("sdk.trace.export").SpanExportResult.SUCCESS
        self._events = Rationed(events)
        self._host = host_of(endpoint)
        self._token = trio.lowlevel.current_trio_token()
        self._failing = False

    def export(self, spans: Sequence[Any]) -> Any:
        """Send a batch; called by the processor's thread."""
        result = self._exporter.export(spans)
        failed = result is not self._success
        if failed and not self._failing:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._tell)
        self._failing = failed
        return result

    def _tell(self) -> None:
        self._events.emit("traces.undelivered", host=self._host)

    def shutdown(self) -> None:
        """Stop repetitions; called again it does nothing."""
        self._exporter.shutdown()


def _library(name: str) -> Any:
    """A module of OpenTelemetry, which only peers with `[traces]` load."""
    try:
        return importlib.import_module(f"opentelemetry.{name}")
    except ModuleNotFoundError as error:
        raise UserError(
            "[traces] is set, but opentelemetry-exporter-otlp-proto-http is not installed here; "
            "type: pip install 'swarm-rl[traces]'"
        ) from error
