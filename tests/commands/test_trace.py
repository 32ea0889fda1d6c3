"""`swarm trace`: a submission's way from the logs of several peers, some of them damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.look.trace import as_otlp, trace_of
from tests.commands.harness import complaint, swarm

HASH, OTHER = "ab" * 32, "cd" * 32


def event(name: str, time: float, peer: str, **fields: object) -> dict[str, object]:
    return {"event": name, "time": time, "peer": peer, **fields}


WAY = [
    event("trainer.trained_on", 16.0, "trainer", step=3, submissions=[OTHER, HASH]),
    event("inference.submission_made", 12.0, "worker", submission=HASH, step=2, seconds=2.0),
    event("inference.submission_delivered", 12.5, "worker", submission=HASH, step=2),
    event(
        "validator.verdict", 13.5, "validator", submission=HASH, seconds=0.75, outcome="accepted"
    ),
    event("validator.verdict", 13.6, "validator", submission=OTHER, seconds=0.5),
    event("inference.receipt", 13.75, "worker", submission=HASH, outcome="accepted"),
    event("trainer.submission_pooled", 14.0, "trainer", submission=HASH, step=2),
]


def test_the_way_of_one_submission_in_order() -> None:
    whole, spans = trace_of(WAY, "abab")
    assert whole == HASH
    assert [(span.name, span.peer, span.began, span.ended) for span in spans] == [
        ("generated and written", "worker", 10.0, 12.0),
        ("pushed, announced and acknowledged", "worker", 12.0, 12.5),
        ("checked", "validator", 12.75, 13.5),
        ("receipt heard by the worker", "worker", 13.5, 13.75),
        ("fetched into the trainer's pool", "trainer", 13.75, 14.0),
        ("trained on", "trainer", 14.0, 16.0),
    ]


def test_all_peers_spans_join_in_one_trace_by_the_hash() -> None:
    resources = as_otlp(*trace_of(WAY, HASH))["resourceSpans"]
    spans = [span for each in resources for span in each["scopeSpans"][0]["spans"]]
    assert len(resources) == 3 and len(spans) == 6
    assert {span["traceId"] for span in spans} == {HASH[:32]}
    assert len({span["spanId"] for span in spans}) == 6
    assert all(int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) for span in spans)


def test_logs_on_disk_may_be_damaged_and_hostile(tmp_path: Path) -> None:
    lines = [json.dumps(each) for each in WAY]
    hostile = event("validator.verdict", 15.0, "\x1b[2J", submission=HASH, outcome="\x1b[31m")
    broken = [*("[1]", "{", "\x00", '{"event": 3}'), json.dumps(hostile | {"time": "x"})]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:3], *broken, json.dumps(hostile)]))
    (tmp_path / "b.jsonl").write_text("\n".join(lines[3:]) + '\n{"event": "trainer.trai')
    out = tmp_path / "spans.json"
    said = swarm("trace", "abab", "--logs", tmp_path, "--otlp", out)
    assert said.status == 0, said.errors
    assert "trained on by …trainer (step 3)" in said.output
    assert "\x1b" not in said.output + out.read_text()
    assert len(json.loads(swarm("trace", HASH, "--logs", tmp_path, "--json").output)["spans"]) == 7
    found = complaint("trace", "ffff", "--logs", tmp_path)
    assert "has no submission 'ffff', and none that begins so" in found and "at least" not in found
    assert "cannot be read" in complaint("trace", "ffff", "--logs", tmp_path / "none.jsonl")


def test_a_prefix_must_name_one() -> None:
    with pytest.raises(UserError, match="the folder of logs has no submission 'ab'"):
        trace_of(WAY, "ab")
