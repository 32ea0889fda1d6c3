"""A peer's spans at a real OTLP/HTTP collector on loopback, and at none."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import trio
import trio.testing
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from swarm.app.live_traces import Exporter, check, tracing
from swarm.app.trace import as_otlp, trace_of
from swarm.errors import UserError
from swarm.events import Event, Events, to_json
from swarm.settings import TraceSettings
from swarm.world.machine import Machine

HASH = bytes.fromhex("ab" * 32)


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        finally:
            server.shutdown()
            thread.join()


def way(endpoint: str) -> list[Event]:
    """Events of a peer that sends spans to `endpoint`, its own of `traces.` among them."""
    heard: list[Event] = []

    async def main() -> None:
        events = Events(Machine(), "worker")
        events.add_sink(heard.append)
        async with tracing(TraceSettings(endpoint=endpoint), events):
            events.emit("inference.submission_made", submission=HASH, step=2, seconds=2.0)
            events.emit("peer.status", connections=1)
            events.emit("trainer.trained_on", submissions=[HASH], step=2)
        await trio.testing.wait_all_tasks_blocked()

    trio.run(main)
    return heard


def test_a_collector_gets_the_spans_of_swarm_trace() -> None:
    with collector() as (endpoint, bodies):
        heard = way(endpoint)
    request = ExportTraceServiceRequest.FromString(b"".join(bodies))
    (resource,) = request.resource_spans
    got = [
        (
            span.trace_id.hex(),
            span.span_id.hex(),
            span.name,
            str(span.start_time_unix_nano),
            str(span.end_time_unix_nano),
        )
        for span in resource.scope_spans[0].spans
    ]
    logged = [json.loads(to_json(event)) for event in heard]
    (wanted,) = as_otlp(*trace_of(logged, HASH.hex()))["resourceSpans"]
    keys = ("traceId", "spanId", "name", "startTimeUnixNano", "endTimeUnixNano")
    assert got == [tuple(span[key] for key in keys) for span in wanted["scopeSpans"][0]["spans"]]
    assert len(got) == 2
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert names == {"service.name": "swarm", "service.instance.id": "worker"}


def test_a_dead_collector_is_one_event() -> None:
    """Bound, and nobody listens: of two batches that fail, the first is said."""
    heard: list[Event] = []

    async def main(endpoint: str) -> None:
        events = Events(Machine(), "worker")
        events.add_sink(heard.append)
        exporter = Exporter(endpoint, events, seconds=0.1)
        for _ in range(2):
            await trio.to_thread.run_sync(exporter.export, ())
        await trio.testing.wait_all_tasks_blocked()

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        trio.run(main, f"http://127.0.0.1:{closed.getsockname()[1]}/v1/traces")
    assert [event.name for event in heard] == ["traces.undelivered"]


def test_an_endpoint_is_https_or_here() -> None:
    check(TraceSettings())
    for endpoint in ("http://192.0.2.7:4318/v1/traces", "collector:4318", "https://"):
        with pytest.raises(UserError, match=r"\[traces\]: endpoint at .* use https"):
            check(TraceSettings(endpoint=endpoint))


def test_without_the_extra_one_sentence_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(UserError, match=r"type: pip install 'swarm-rl\[traces\]'"):
        check(TraceSettings(endpoint="http://127.0.0.1:4318/v1/traces"))
