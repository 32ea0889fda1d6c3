"""A peer's figures for Prometheus: what they count, who may read them, and the files that do."""

from __future__ import annotations

import ast
import json
import math
import re
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from swarm.errors import UserError
from swarm.events import Event
from swarm.look.health import Pulse
from swarm.look.metrics import server
from swarm.look.metrics.figures import EVENT_NAMES_MAX, FIGURES, OTHER, Figures
from swarm.look.metrics.server import MetricsServer
from swarm.node.local import open_node
from swarm.settings import PeerSettings
from swarm.transport.http import limits
from tests.commands.harness import complaint
from tests.docs.metrics_page import PAGE, ROLES, page, rows, watched
from tests.docs.pages import ROOT

DEPLOY = ROOT / "deploy"


TRAINING = [each.field for each in FIGURES["trainer"] if each.name.startswith("swarm_training_")]


def tell(figures: Figures, name: str, /, **fields: Any) -> None:
    figures(Event(name, 0.0, "peer", fields))


def value(figures: Figures, name: str, **labels: str) -> float | None:
    return figures.registry.get_sample_value(name, labels)


# --- figures -------------------------------------------------------------------------------------


def test_events_become_figures() -> None:
    figures = watched("inference", "trainer")
    made = value(figures, "swarm_training_reward")
    assert made is not None and math.isnan(made)
    for tokens in (5, 7):
        tell(figures, "inference.submission_made", tokens=tokens, seconds=0.2)
    receipt = {"outcome": "refused", "failed": "proofs", "groups": 2}
    tell(figures, "inference.receipt", **receipt)
    tell(figures, "trainer.step_trained", step=1, reward=0.5)
    assert value(figures, "swarm_tokens_generated_total") == 12
    assert value(figures, "swarm_generation_seconds_count") == 2
    assert value(figures, "swarm_generation_seconds_bucket", le="0.3") == 2
    assert value(figures, "swarm_generation_seconds_bucket", le="0.1") == 0
    assert value(figures, "swarm_receipts_total", outcome="refused") == 1
    assert value(figures, "swarm_receipts_total", outcome="accepted") == 0
    assert value(figures, "swarm_groups_credited_total") == 2
    told = {"alarm": "disk_low", "severity": "page"}
    for name, raised in (("alarm.raised", 1), ("alarm.cleared", 0)):
        tell(figures, name, **told)
        assert value(figures, "swarm_alarm", **told) == raised
    assert value(figures, "swarm_training_reward") == 0.5
    assert value(figures, "swarm_events_total", event="inference.submission_made") == 2


@settings(max_examples=20)
@given(st.lists(st.text(), max_size=5))
def test_no_text_of_a_stranger_becomes_a_label(texts: list[str]) -> None:
    figures = watched("inference", "validator", "trainer")
    before = _series(figures)
    for text in texts:
        judged = {"outcome": text, "failed": text, "seconds": 0.0}
        tell(figures, "validator.verdict", **judged)
        tell(figures, "inference.receipt", **judged, groups=0)
    new = _series(figures) - before
    assert new <= {
        ("swarm_events_total", "validator.verdict"),
        ("swarm_events_total", "inference.receipt"),
        ("swarm_verdicts_total", OTHER),
        ("swarm_receipts_total", OTHER),
    }


def _series(figures: Figures) -> set[tuple[str, ...]]:
    return {
        (sample.name, *sample.labels.values())
        for metric in figures.registry.collect()
        for sample in metric.samples
    }


def test_names_of_events_are_bounded() -> None:
    figures = watched("relay")
    for number in range(EVENT_NAMES_MAX + 10):
        tell(figures, f"package.event_{number}")
    assert value(figures, "swarm_events_total", event=OTHER) == 10
    assert value(figures, "swarm_events_total", event="package.event_0") == 1


def _source() -> dict[Path, str]:
    """The source but for `swarm/look`, which reads the events that the rest emits."""
    return {
        path: path.read_text(encoding="utf-8")
        for room in ("swarm", "peers")
        for path in sorted((ROOT / room).rglob("*.py"))
        if not path.is_relative_to(ROOT / "swarm/look")
    }


def _emitted(names: Iterable[str]) -> dict[str, set[str]]:
    """The fields that the source gives these events by keyword, each time it emits one."""
    found: dict[str, set[str]] = {}
    quoted = [f'"{name}"' for name in names]
    for text in _source().values():
        if not any(name in text for name in quoted):
            continue  # parsing is slow
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name, fields = node.args[0].value, {each.arg for each in node.keywords if each.arg}
                if isinstance(name, str) and f'"{name}"' in quoted:
                    found[name] = found.get(name, fields) & fields
    return found


def test_every_figure_is_fed_by_an_event_that_has_its_field() -> None:
    figures = watched(*ROLES)
    handled = figures.handlers.keys() - {"alarm.raised", "alarm.cleared"}
    emitted = _emitted(handled)
    assert handled == set(emitted)
    for name in handled:
        tell(figures, name, **dict.fromkeys(emitted[name], 1.0))  # no KeyError
    trainer = "".join(text for path, text in _source().items() if "trainer" in path.parts)
    assert [each for each in TRAINING if f'"{each}"' not in trainer] == []
    unset = [
        metric.name
        for metric in figures.registry.collect()
        for sample in metric.samples
        if metric.type == "gauge" and math.isnan(sample.value)
    ]
    fed_by_the_step = {f"swarm_training_{field}" for field in TRAINING}
    assert set(unset) == fed_by_the_step


# --- the server ----------------------------------------------------------------------------------


@asynccontextmanager
async def scraped(tmp_path: Path, keys: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """A client of a bootstrap peer's metrics."""
    chosen = PeerSettings(
        role=["bootstrap"],
        listen=["/ip4/127.0.0.1/tcp/0"],
        home=str(tmp_path / "home"),
        metrics="127.0.0.1:0",
        metrics_key_file=keys,
    )
    async with open_node(chosen, events_sink=lambda event: None) as node:
        with closing(MetricsServer(chosen)) as metrics:
            pulse = Pulse(tmp_path, node.peer_id, chosen.role)
            async with (
                trio.open_nursery() as nursery,
                httpx.AsyncClient(base_url=metrics.url, timeout=20, trust_env=False) as client,
            ):
                nursery.start_soon(metrics.serve, node, pulse)
                yield client
                nursery.cancel_scope.cancel()


@pytest.mark.wall_clock
async def test_a_peer_on_this_machine_is_scraped(tmp_path: Path) -> None:
    async with scraped(tmp_path) as client:
        reply = await client.get("/metrics")
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = {each.name: each for each in text_string_to_metric_families(reply.text)}
        assert found["swarm_ready"].samples[0].value == 1
        assert found["process_resident_memory_bytes"].samples[0].value > 1e6
        head = await client.head("/metrics?x=1")
        assert (head.status_code, head.text) == (200, "")
        assert (await client.get("/")).status_code == 404
        assert (await client.post("/metrics", content=b"x")).status_code == 405
        for name in ("evil.example", "[::2]", ""):
            stranger = await client.get("/metrics", headers={"host": name})
            assert stranger.status_code == 403, name
        port = client.base_url.port
        assert port is not None
        assert b"400" in await _reply(port, b"nonsense\r\n\r\n")
        assert b"400" in await _reply(port, b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 40_000)
        assert (await client.get("/metrics")).status_code == 200


async def _reply(port: int, sent: bytes) -> bytes:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        with trio.fail_after(20):
            await stream.send_all(sent)
            return bytes(await stream.receive_some())


@pytest.mark.wall_clock
async def test_with_a_key_only_those_who_have_it_read(tmp_path: Path) -> None:
    key, keys = "k" * 20, tmp_path / "keys"
    keys.write_text(f"{'o' * 20}\n{key}\n", encoding="utf-8")
    async with scraped(tmp_path, str(keys)) as client:
        for header, status in (
            ("", 401),
            ("Bearer", 401),
            (f"Basic {key}", 401),
            (f"Bearer {key}k", 401),
            (f"bearer {key}", 200),
        ):
            headers = {"authorization": header, "host": "lab.example:9464"}
            assert (await client.get("/metrics", headers=headers)).status_code == status, header


@pytest.mark.parametrize("sent", [b"", b"GET", b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"])
@pytest.mark.wall_clock
async def test_connections_are_bounded_and_the_oldest_makes_way(
    sent: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nobody who lets the peer wait keeps a scraper out."""
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 1)
    async with scraped(tmp_path) as client:
        port = client.base_url.port
        assert port is not None
        async with await trio.open_tcp_stream("127.0.0.1", port) as idle:
            await idle.send_all(sent)
            with trio.fail_after(limits.HEAD_SECONDS / 2):
                assert (await client.get("/metrics")).status_code == 200
                with suppress(trio.BrokenResourceError):
                    while await idle.receive_some():
                        pass


def test_wrong_settings_are_sentences(tmp_path: Path) -> None:
    def problem(metrics: str, keys: str = "") -> str:
        chosen = PeerSettings(metrics=metrics, metrics_key_file=keys)
        with pytest.raises(UserError) as caught:
            MetricsServer(chosen)
        return str(caught.value)

    short = tmp_path / "short"
    short.write_text("k")
    assert "metrics '9464' is no host:port" in problem("9464")
    assert "name it with metrics_key_file" in problem("0.0.0.0:0")
    assert "at least 16" in problem("0.0.0.0:0", str(short))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        peer = (
            "peer",
            "--role",
            "bootstrap",
            "--home",
            tmp_path / "home",
            "--set",
            f"metrics={address}",
        )
        assert complaint(*peer) == (
            f"metrics {address}: nothing can listen there (Address already in use); choose "
            "another address or port"
        )
    assert not (tmp_path / "home").exists()


# --- the page and the files ----------------------------------------------------------------------


def test_the_page_lists_every_figure() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.docs.metrics_page"


def _dashboard() -> list[str]:
    panels = json.loads((DEPLOY / "grafana/swarm.json").read_text(encoding="utf-8"))["panels"]
    assert len({each["id"] for each in panels}) == len(panels)
    return [target["expr"] for each in panels for target in each.get("targets", ())]


def _alerts() -> list[str]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text("utf-8"))["groups"]
    assert all({"alert", "expr", "annotations"} <= set(each) for each in group["rules"])
    return [each["expr"] for each in group["rules"]]


def test_dashboard_and_alerts_use_the_names_that_exist() -> None:
    known = {"up"}
    labels: dict[str, set[str]] = {}
    for role in ROLES:
        for name, kind, own, _ in rows(role):
            suffixes = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
            known |= {name + suffix for suffix in suffixes}
            labels.setdefault(name, set()).update(filter(None, own.split(", ")))
    expressions = [*_dashboard(), *_alerts()]
    assert len(expressions) > 30
    used = {
        name for each in expressions for name in re.findall(r"\b(?:swarm|process)_\w+|\bup\b", each)
    }
    assert used <= known, used - known
    for each in expressions:
        for name, chosen in re.findall(r"(\w+)\{([^}]*)\}", each):
            for label, text in re.findall(r'(\w+)="([^"]*)"', chosen):
                assert label in labels.get(name, set()) | {"job"}, each
                assert label != "outcome" or text == "refused", each


def test_the_scrape_configuration_names_the_job_of_the_dashboard() -> None:
    found = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
    assert [each["job_name"] for each in found["scrape_configs"]] == ["swarm"]
    assert found["rule_files"] == ["alerts.yml"]
