"""The trainer's online filter on production roles: batches are filled, nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.simulation import SIMULATED, Plan, Simulation
from swarm.events import Event
from swarm.ledger.entries import Consumed, decode
from swarm.wire.manifest import Filters
from tests.simnet.runs import going

STEPS = 3
BATCH = 8


def train(
    filters: Filters, *, workers: int, reward: float, accuracy_max: float = 1.0
) -> tuple[list[tuple[float, Event]], list[Consumed]]:
    """A whole run whose completions are right with a probability of `reward`.

    Gives the trainer's events with their virtual times, and what its log says of submissions.
    """
    heard: list[tuple[float, Event]] = []
    entries: list[Consumed] = []

    async def main() -> None:
        simulation = Simulation(
            5,
            workload=Workload(
                model_bytes=3_000_000,
                completion_tokens_mean=64,
                reward_start=reward,
                reward_gain=0.0,
            ),
        )
        simulation.listeners.append(
            lambda now, peer, event: heard.append((now, event)) if peer.name == "trainer" else None
        )
        over = simulation.expect("trainer.run_complete", ["trainer"])
        async with going(
            simulation,
            Plan("v0", ["validator"]),
            Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=5.0)),
            *[Plan(f"w{number}", ["inference"]) for number in range(workers)],
            steps=STEPS,
            groups_per_step=BATCH,
            filters=filters,
            environments=[replace(SIMULATED, accuracy_max=accuracy_max)],
        ):
            assert await simulation.meet(over, 3000.0)
            rows = (
                simulation.peers["trainer"]
                .disk.database("ledger.sqlite")
                .read(
                    "SELECT entry FROM entries WHERE owner = ? ORDER BY position",
                    (str(simulation.peers["trainer"].id),),
                )
            )
            found = [decode(raw) for (raw,) in rows]
            entries.extend(entry for entry in found if isinstance(entry, Consumed))

    run_virtual(main, seed=5, limit_seconds=4000)
    return heard, entries


def named(heard: list[tuple[float, Event]], name: str) -> list[tuple[float, dict[str, Any]]]:
    return [(now, dict(event.fields)) for now, event in heard if event.name == name]


def consumed_by_step(entries: list[Consumed]) -> list[int]:
    counted: Counter[int] = Counter()
    for entry in entries:
        counted[entry.step] += entry.outcomes.count("consumed")
    return [counted[step] for step in range(STEPS)]


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_batch_is_filled_with_groups_that_teach(workers: int) -> None:
    """About one group in five has any reward: drop trains on few, refill on as many as asked."""
    heard, entries = train(Filters(fill="refill"), workers=workers, reward=0.03)
    assert all(BATCH <= count < 2 * BATCH for count in consumed_by_step(entries))
    _, dropped = train(Filters(), workers=workers, reward=0.03)
    assert all(count < BATCH for count in consumed_by_step(dropped))
    orders = named(heard, "trainer.step_opened")
    assert max(fields["groups_wanted"] for _, fields in orders) > 2 * BATCH
    last = named(heard, "trainer.step_trained")[-1][1]
    assert 0.05 < last["keep_rate"] < 0.5
    given_up = sum(entry.outcomes.count("zero-advantage") for entry in entries)
    assert last["left_out_no_spread"] == given_up > 5 * BATCH


@pytest.mark.slow
def test_a_batch_that_cannot_be_filled_is_trained_on_after_its_deadline() -> None:
    heard, entries = train(Filters(fill="refill", refill_seconds=40.0), workers=1, reward=0.004)
    counts = consumed_by_step(entries)
    assert all(count > 0 for count in counts)
    assert min(counts) < BATCH
    idle = [fields["idle_seconds"] for _, fields in named(heard, "trainer.step_trained")]
    assert max(idle) > 39.99


def test_every_accepted_group_ends_in_the_log() -> None:
    """Consumed, carried, zero-advantage or stale, and each submission once."""
    heard, entries = train(Filters(), workers=3, reward=0.2, accuracy_max=0.3)
    assert len({entry.submission for entry in entries}) == len(entries)
    outcomes = Counter(outcome for entry in entries for outcome in entry.outcomes)
    assert set(outcomes) <= {"consumed", "zero-advantage", "stale", "carried"}
    assert outcomes["consumed"] and outcomes["zero-advantage"]
    last = named(heard, "trainer.step_trained")[-1][1]
    assert last["left_out_too_easy"] > 0
