"""Runs of any length, made up from a seed: what the page is sent of them, through real messages.

`python -m tests.dashboard.recorded 250` serves the page of such a run until it is interrupted."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import trio

from swarm.ledger.entries import RoundFigures
from swarm.look.dashboard.history import STEPS_KEPT, History
from swarm.look.dashboard.server import Dashboard, serve
from swarm.look.dashboard.snapshot import Snapshot, snapshot_of
from swarm.look.dashboard.watch import Feed
from swarm.look.onlooker import RunStatus
from swarm.run.run import Run
from swarm.shardcast.fetch.job import source_mark
from swarm.transport.http.local_server import open_listener
from swarm.wire.manifest import EnvironmentReference, Outer, RunManifest, Schedule
from swarm.wire.messages import (
    Arrival,
    Checkpoint,
    CheckpointReference,
    EnvironmentEvaluation,
    Evaluation,
    Present,
)
from tests.dashboard.harness import order, present, published, verdict
from tests.ledger.harness import ALICE, BOB, OWNER, TRAINER, identity, manifest
from tests.network.harness import sealed_manifest

WORKERS = [identity(number) for number in range(10, 16)]
RELAYS = [identity(number) for number in range(20, 22)]
CHEAT = identity(30)
REGIONS = ["eu-west", "eu-west", "us-east", "ap-south", "us-east", ""]
SPEEDS = [3010.0, 2560.0, 2490.0, 812.3, 655.0, 0.0]
POLICY_BYTES = 1_240_000_000
REASON = "128 of 128 proofs do not fit the policy's activations"


def described(name: str = "arithmetic-1b", *, labels: Sequence[str], steps: int) -> RunManifest:
    """The manifest of a run with these environments."""
    environments = [EnvironmentReference(name=label, version="1") for label in labels]
    return msgspec.structs.replace(
        manifest([TRAINER], [ALICE, BOB]),
        name=name,
        environments=environments,
        schedule=Schedule(steps=steps, groups_per_step=32),
    )


def recorded(steps: int, labels: Sequence[str] = ("sort-digits",), seed: int = 7) -> Snapshot:
    """A run whose step number `steps` is open: six workers, one of which has not caught up, and a
    cheat that was evicted."""
    drawn = random.Random(seed)
    history = History()
    first = max(0, steps - STEPS_KEPT)
    evaluation = None
    for step in range(first, steps):
        _learn_step(history, drawn, step, labels)
        if step % 10 == 9:
            evaluation = _evaluated(drawn, step + 1, labels)
            history.learn_evaluation(evaluation)
    for number in reversed(range(min(steps, 40))):
        kind = (
            ("proofs", REASON)
            if number % 4
            else ("sampling", "12 tokens are not the recomputed sample")
        )
        refused = verdict(
            10**6 + number,
            worker=CHEAT if number % 4 else WORKERS[3],
            step=max(first, steps - 1 - number),
            outcome="refused",
            failed=kind[0],
            detail=kind[1],
            rewards=[],
        )
        history.learn(refused, ALICE.peer_id, order(steps))
    total = max(10, steps + steps // 2)
    run = Run(sealed_manifest(OWNER, described(labels=labels, steps=total)))
    reference = CheckpointReference(
        lineage=0, step=max(0, steps - 1), digest=bytes(32), size_bytes=1
    )
    status = RunStatus(
        run,
        order=order(steps, 32) if steps else None,
        present={each.peer: each for each in _peers(steps)},
    )
    status.evaluation, status.evaluator = evaluation, BOB.peer_id
    if steps:
        status.checkpoint = Checkpoint(reference=reference, total_bytes=POLICY_BYTES)
    return snapshot_of(status, history, [])


def _progress(step: int) -> float:
    """A reward that grows from 0.2 to 0.9."""
    return 0.2 + 0.7 * (1 - math.exp(-step / 90))


def _learn_step(history: History, drawn: random.Random, step: int, labels: Sequence[str]) -> None:
    mean = _progress(step)
    for number in range(4 if step < 50 else 6):
        rewards = [[float(drawn.random() < mean) for _ in range(8)] for _ in range(4)]
        tokens = sum(drawn.choice((6, 7, 7, 8)) for _ in range(32))
        worker = WORKERS[drawn.randrange(5)]
        accepted = verdict(
            step * 10 + number,
            step=step,
            worker=worker,
            rewards=rewards,
            tokens=tokens,
            size_bytes=5200 + 31 * tokens,
        )
        history.learn(accepted, ALICE.peer_id, order(step))
    noise = drawn.gauss(0, 0.03)
    told: dict[str, Any] = {
        "reward": mean + noise,
        "length": 7 + drawn.gauss(0, 0.06),
        "entropy": 0.9 * math.exp(-step / 90) + 0.15 + abs(drawn.gauss(0, 0.01)),
        "kl": abs(drawn.gauss(0.02, 0.015)),
        "clipped": abs(drawn.gauss(0.03, 0.02)),
        "gradient_norm": abs(drawn.gauss(2, 0.6)),
        "learning_rate": 6e-6 * min(1, (step + 1) / 10),
        "loss": drawn.gauss(0.005, 0.01),
        "seconds": 4.2 if step == 0 else abs(drawn.gauss(1.2, 0.2)),
        "repetition": abs(drawn.gauss(0.004, 0.001)),
        "truncated": abs(drawn.gauss(0.01, 0.005)),
    }
    if len(labels) > 1:
        told["of_each"] = [
            [min(1.0, mean + 0.1 * at + noise), 7.0 + 20 * at, 0.4 + 0.1 * at, 0.02, 0.0, 0.01]
            for at in range(len(labels))
        ]
    history.learn_training(published(step + 1, **told), order(step))


def _evaluated(drawn: random.Random, policy: int, labels: Sequence[str]) -> Evaluation:
    rewards = [min(0.95, _progress(policy) + drawn.gauss(0, 0.02)) for _ in labels]
    return Evaluation(
        reference=CheckpointReference(lineage=0, step=policy, digest=bytes(32), size_bytes=1),
        state="done",
        tasks=256 * len(labels),
        reward=sum(rewards) / len(labels),
        environments=[
            EnvironmentEvaluation(
                label=label, reward=reward, low=reward - 0.04, high=reward + 0.04, tokens=7.1
            )
            for label, reward in zip(labels, rewards, strict=True)
        ],
    )


def _peers(steps: int) -> list[Present]:
    policy = max(0, steps - 1)

    def holds(share: int, source: str) -> Arrival:
        return Arrival(
            policy=policy, held=share, source=source_mark(source), source_share=800, sources=3
        )

    def moved(sent: int, received: int) -> dict[str, Any]:
        return {"bytes_sent": sent * steps * 10**6, "bytes_received": received * steps * 10**6}

    found = [
        present(
            TRAINER.peer_id,
            "trainer",
            policy=policy,
            step=steps,
            **moved(2500, 30),
            doing=f"waiting for rollouts of step {steps}",
            reached="directly",
        ),
        *(
            present(
                each.peer_id,
                "validator",
                policy=policy,
                step=steps,
                region="eu-west",
                doing="ready to judge",
                arrival=holds(1000, TRAINER.peer_id),
                **moved(900, 1300),
            )
            for each in (ALICE, BOB)
        ),
        *(
            present(
                each.peer_id,
                "relay",
                policy=policy,
                region="us-east",
                doing="relaying",
                arrival=holds(900, TRAINER.peer_id),
                **moved(4000, 1240),
            )
            for each in RELAYS
        ),
        present(CHEAT.peer_id, "inference", standing="evicted", doing="waiting for work"),
    ]
    for at, each in enumerate(WORKERS):
        late = at == len(WORKERS) - 1
        arrival = holds(430 if late else 1000, RELAYS[at % 2].peer_id)
        found.append(
            present(
                each.peer_id,
                "inference",
                policy=policy - late,
                step=steps,
                region=REGIONS[at],
                tokens_per_second=SPEEDS[at],
                arrival=arrival,
                reached="through a relay",
                doing=f"fetching policy {policy}" if late else f"generating step {steps}",
                **moved(300, 1250),
            )
        )
    return found


def of_several_trainers(rounds: int, trainers: int = 4, seed: int = 7) -> Snapshot:
    """A run of an outer loop that has no step orders: pre-training by several sites."""
    drawn, history = random.Random(seed), History()
    keys = [identity(number) for number in range(40, 40 + trainers)]
    for key in keys:
        for round in range(1, rounds + 1):
            loss = 2.9 + 3 * math.exp(-round / 20)
            told = RoundFigures(
                loss=loss + drawn.gauss(0, 0.02),
                validation_loss=loss + 0.05,
                tokens_merged=round * 8_000_000,
                trainers_present=trainers,
                trainers_merged=trainers - (round % 17 == 0),
                bytes_sent=340_000_000 + drawn.randrange(10**7),
                bytes_received=330_000_000 + drawn.randrange(10**7),
                utilisation=0.93 + drawn.gauss(0, 0.01),
                rounds_lost=2 if key is keys[3] and round == rounds else 0,
                tokens_lost=1_500_000 if key is keys[3] and round == rounds else 0,
            )
            history.learn_round(key.peer_id, round, told)
    described_run = msgspec.structs.replace(
        manifest(keys, [ALICE]), name="three-sites", outer=Outer(rounds=rounds * 2)
    )
    run = Run(sealed_manifest(OWNER, described_run))
    entries = [
        present(
            key.peer_id,
            "trainer",
            policy=rounds,
            step=rounds,
            region=REGIONS[at],
            doing=f"round {rounds + 1}: inner steps",
            bytes_sent=rounds * 340_000_000,
            bytes_received=rounds * 330_000_000,
        )
        for at, key in enumerate(keys)
    ]
    status = RunStatus(run, present={each.peer: each for each in entries})
    return snapshot_of(status, history, [])


def answers(seed: int = 7) -> list[dict[str, Any]]:
    """Rollouts as the page is given them, of tasks that sort digits; half of them are right."""
    drawn, found = random.Random(seed), []
    for at in range(8):
        digits = [drawn.randrange(10) for _ in range(6)]
        right = sorted(digits)
        said = right if at % 2 == 0 else [*right[:3], *digits[3:]]
        reward = sum(one == two for one, two in zip(said, right, strict=True)) / 6
        texts = {
            "prompt": f"sort {' '.join(map(str, digits))}:",
            "model": f" {' '.join(map(str, said))}\n",
        }
        found.append(
            {
                **{"step": 249, "policy": 248, "worker": WORKERS[at % 5].peer_id, "sample": at},
                **{"group": at // 2, "environment": "sort-digits", "reward": reward},
                **{"advantage": 2 * (reward - 0.75), "fate": "accepted", "verdict": "accepted"},
                **{"detail": "", "parts": {}},
                "turns": [{"kind": kind, "text": text} for kind, text in texts.items()],
            }
        )
    return found


def _made(kind: str) -> Snapshot:
    if kind == "rounds":
        return of_several_trainers(60)
    if kind == "mixture":
        return recorded(120, ["sort-digits", "tools", "code"])
    return recorded(int(kind))


async def _serve(kind: str, listen: str) -> None:
    with open_listener(listen) as listener:
        async with trio.open_nursery() as nursery:
            feed = Feed(_made(kind))
            print(await nursery.start(serve, Dashboard(feed), listener), flush=True)


if __name__ == "__main__":
    trio.run(_serve, sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1:0")
