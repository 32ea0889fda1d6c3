"""A dashboard's feed made of real messages, and its server on a socket."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from swarm.ledger.entries import CheckpointPublished, TrainingFigures
from swarm.look.dashboard.history import History
from swarm.look.dashboard.server import Dashboard, serve
from swarm.look.dashboard.snapshot import Snapshot, snapshot_of
from swarm.look.dashboard.watch import Feed
from swarm.look.onlooker import RunStatus
from swarm.run.members import Standing
from swarm.run.run import Run
from swarm.shardcast.fetch.job import source_mark
from swarm.transport.http.local_server import open_listener
from swarm.wire.messages import Arrival, CheckpointReference, Heartbeat, Present, StepOrder, Verdict
from tests.ledger.harness import ALICE, BOB, OWNER, TRAINER, WORKER, manifest, verdict_at
from tests.network.harness import sealed_manifest

TOKEN = "a-token-of-this-test"

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[2J"


def order(step: int = 3, groups: int = 8, **changes: Any) -> StepOrder:
    return StepOrder(
        **{
            "step": step,
            "revision": 0,
            "checkpoint": CheckpointReference(
                lineage=0, step=max(0, step - 1), digest=bytes(32), size_bytes=1
            ),
            "nonce": bytes(32),
            "groups_wanted": groups,
            "submissions_max": 9,
            **changes,
        }
    )


def present(
    peer: str, role: str, *, standing: Standing = "live", age_seconds: float = 2.0, **beat: Any
) -> Present:
    return Present(
        peer=peer,
        heartbeat=Heartbeat(roles=[role], **beat),
        age_seconds=age_seconds,
        standing=standing,
    )


def status_with(entries: Sequence[Present], step_order: StepOrder | None) -> RunStatus:
    run = Run(sealed_manifest(OWNER, manifest([TRAINER], [ALICE, BOB])))
    return RunStatus(run, order=step_order, present={each.peer: each for each in entries})


def verdict(number: int, **changes: Any) -> Verdict:
    return verdict_at(number, **changes)(number)


def published(policy: int, **figures: Any) -> CheckpointPublished:
    """A trainer's entry, with the figures of the step before the policy."""
    told = TrainingFigures(**{"reward": 0.5, "entropy": 1.25, "seconds": 3.0, **figures})
    return CheckpointPublished(lineage=0, step=policy, manifest=bytes(32), figures=told)


def arrival(source: str, policy: int = 2, held: int = 430) -> Arrival:
    """A policy that comes mostly from one peer."""
    return Arrival(
        policy=policy, held=held, source=source_mark(source), source_share=800, sources=3
    )


REFUSED: dict[str, Any] = {"outcome": "refused", "failed": "proofs", "rewards": [], "tokens": 0}


def example(step: int = 3) -> Snapshot:
    """A small run in which one peer has hostile names for everything."""
    history = History()
    for policy in range(1, step):
        history.learn_training(published(policy), order(step))
    for number in range(1, 40):
        at = min(step, number // 10)
        reward = [[1.0, 0.0], [float(at > 1), 0.0]]
        history.learn(verdict(number, step=at, rewards=reward), ALICE.peer_id, order(step))
    refused = {**REFUSED, "step": step, "detail": HOSTILE}
    history.learn(verdict(99, worker=BOB, **refused), ALICE.peer_id, order(step))
    entries = [
        present(TRAINER.peer_id, "trainer", policy=2, step=step, doing="waiting for rollouts"),
        present(ALICE.peer_id, "validator", policy=2, region="eu-west", doing="judging step 3"),
        present(
            WORKER.peer_id,
            "inference",
            policy=1,
            tokens_per_second=812.3,
            doing=HOSTILE,
            arrival=arrival(ALICE.peer_id),
        ),
        present("evil", "inference", standing="evicted", age_seconds=70.0),
    ]
    return snapshot_of(status_with(entries, order(step)), history, [HOSTILE])


@asynccontextmanager
async def serving(
    feed: Feed, tokens: frozenset[str] = frozenset(), **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a dashboard on a loopback port."""
    async with trio.open_nursery() as nursery:
        listener = open_listener("127.0.0.1:0")
        url = await nursery.start(serve, Dashboard(feed, tokens=tokens, **options), listener)
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http:
            yield http
        nursery.cancel_scope.cancel()


def in_node(folder: Path, script: str, *parts: str) -> Any:
    """What a script prints as JSON, beside these files of the page; skips without node."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    for name in parts:
        part = files("swarm.look.dashboard").joinpath(name)
        (folder / name).write_bytes(part.read_bytes())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "run.js").write_text(script)
    done = subprocess.run(
        [node, "run.js"], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
