"""The dashboard of a run with 1,000 peers: bytes for a page, and CPU seconds for an update.

An update is all that the dashboard computes between two looks: it decodes the answers of the
trusted peers, merges them, makes the rows, compares them with the last ones and encodes what a page
gets. Left out: the network's own work (encryption, sockets), and pages that are open, which each
cost the copying of the encoded change.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from importlib.resources import files

import msgspec

from benchmarks.operation.report import Spread, spread_of
from swarm.identity import Identity
from swarm.ledger import wire
from swarm.look import dashboard as package
from swarm.look.dashboard.building import Builder
from swarm.look.dashboard.history import STEPS_KEPT, History
from swarm.look.dashboard.server import PARTS
from swarm.look.dashboard.snapshot import Snapshot, changes
from swarm.look.dashboard.watch import pause_seconds
from swarm.look.onlooker import RunStatus
from swarm.messages import Present
from swarm.run.run import Run
from tests.dashboard.harness import arrival, order, present, published, verdict
from tests.ledger.harness import ALICE, BOB, OWNER, TRAINER, identity, manifest
from tests.network.harness import sealed_manifest

PEERS = 1000
TRUSTED = 4
"""Trusted peers whose answers are decoded: a trainer and three validators."""

VERDICTS_PER_STEP = 20

UPDATES = 40

STEP = STEPS_KEPT - 1

ORDER = order(STEP)


class Updates(msgspec.Struct, frozen=True):
    """Repeated updates in which a share of the peers sent another heartbeat."""

    peers_moved: float
    """Share."""
    cpu_ms: Spread
    bytes_sent: Spread
    """To each page."""
    core_percent: float
    """At the dashboard's pace with so many peers, from the median."""


class DashboardFigure(msgspec.Struct, frozen=True):
    """See the module's docstring."""

    peers: int
    steps: int
    page_bytes: int
    """All files of the page."""
    state_bytes: int
    """The whole state, which each page gets once."""
    pace_seconds: float
    """Seconds between two looks."""
    first_cpu_ms: Spread
    """An update that makes every row."""
    updates: list[Updates]


def measure() -> DashboardFigure:
    """Measure updates in which a tenth of the peers moved, and in which all did."""
    rng = random.Random(0)
    workers = [identity(10_000 + number) for number in range(PEERS)]
    peers = [worker.peer_id for worker in workers]
    run = Run(sealed_manifest(OWNER, manifest([TRAINER], [ALICE, BOB])))
    history = _history(workers)
    listed = [_present(peer, peers, rng) for peer in peers]
    first = [_updated(Builder(), run, history, _answers(listed))[1] for _ in range(5)]
    builder = Builder()
    snapshot, _ = _updated(builder, run, history, _answers(listed))
    found = []
    for share in (0.1, 1.0):
        times: list[float] = []
        sizes: list[float] = []
        for number in range(UPDATES):
            for index in rng.sample(range(PEERS), int(share * PEERS)):
                listed[index] = _present(peers[index], peers, rng)
            changed = verdict(
                number, step=STEP, submission=rng.randbytes(32), worker=workers[number]
            )
            history.learn(changed, ALICE.peer_id, ORDER)
            answers = _answers(listed)
            began = time.process_time()
            new, _ = _updated(builder, run, history, answers)
            sent = msgspec.json.encode(changes(snapshot, new))
            times.append(1000 * (time.process_time() - began))
            sizes.append(len(sent))
            snapshot = new
        cpu = spread_of(times)
        percent = round(cpu.median / 10 / pause_seconds(PEERS), 3)
        found.append(Updates(share, cpu, spread_of(sizes, 0), percent))
    page = sum(len(files(package).joinpath(name).read_bytes()) for name, _ in PARTS.values())
    return DashboardFigure(
        peers=PEERS,
        steps=len(snapshot.steps),
        page_bytes=page,
        state_bytes=len(msgspec.json.encode(snapshot)),
        pace_seconds=pause_seconds(PEERS),
        first_cpu_ms=spread_of(first),
        updates=found,
    )


def _updated(
    builder: Builder, run: Run, history: History, answers: list[bytes]
) -> tuple[Snapshot, float]:
    """The next snapshot, and the CPU milliseconds that it took."""
    began = time.process_time()
    status = RunStatus(run, order=ORDER)
    for answer in answers:
        decoded = wire.answer_decoder.decode(answer)
        assert isinstance(decoded, wire.Status)
        status.learn(decoded)
    snapshot = builder.snapshot(status, history, [])
    return snapshot, 1000 * (time.process_time() - began)


def _present(peer: str, peers: Sequence[str], rng: random.Random) -> Present:
    """A peer's next heartbeat: it is at a policy and a step, fetches, and has moved bytes."""
    return present(
        peer,
        "inference",
        age_seconds=rng.uniform(0, 10),
        policy=STEP - rng.randrange(3),
        step=STEP,
        tokens_per_second=rng.uniform(500, 3000),
        doing=f"generating {rng.randrange(4)} of step {STEP}",
        bytes_sent=rng.randrange(2**40),
        bytes_received=rng.randrange(2**40),
        region=rng.choice(["eu-west", "us-east", "ap-south"]),
        arrival=arrival(rng.choice(peers), STEP - 1, rng.randrange(1001)),
    )


def _answers(listed: list[Present]) -> list[bytes]:
    return [wire.encoder.encode(wire.Status([], listed)) for _ in range(TRUSTED)]


def _history(workers: list[Identity]) -> History:
    history = History()
    number = 0
    for step in range(STEPS_KEPT):
        history.learn_training(published(step + 1, kl=0.01, loss=0.1, clipped=0.02), ORDER)
        for _ in range(VERDICTS_PER_STEP):
            number += 1
            digest = number.to_bytes(32, "big")
            worker = workers[number % PEERS]
            found = verdict(number, step=step, submission=digest, worker=worker)
            history.learn(found, ALICE.peer_id, ORDER)
    return history
