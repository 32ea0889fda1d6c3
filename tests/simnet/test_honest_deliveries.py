"""Workers that crash, lose connections or meet slow validators lose nothing and skip nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio

from peers.validator.role import ValidatorRole
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.wire.manifest import Limits
from tests.simnet.runs import going

RUNNER = partial(run_virtual, seed=3)

DISTURBED_FROM, CALM_AGAIN, END = 20.0, 50.0, 75.0
LIMITS = Limits(acknowledgement_seconds=2.0, verdict_seconds=6.0)
VALIDATORS = ("v0", "v1")
Disturb = Callable[[Simulation], Awaitable[None]]


async def worker_crashes(simulation: Simulation) -> None:
    worker = simulation.peers["w"]
    for _ in range(3):
        await trio.sleep(4.3)
        await worker.kill()
        await trio.sleep(2)
        await worker.start(resume=True)


async def connection_breaks(simulation: Simulation) -> None:
    """To one validator after the other, and once to both."""
    worker = simulation.peers["w"].id
    for names in (VALIDATORS[:1], VALIDATORS[1:], VALIDATORS):
        for name in names:
            simulation.network.cut(worker, simulation.peers[name].id)
        await trio.sleep(5)
        for name in names:
            simulation.network.heal(worker, simulation.peers[name].id)
        await trio.sleep(3)


async def validators_restart(simulation: Simulation) -> None:
    for name in VALIDATORS:
        validator = simulation.peers[name]
        await validator.kill()
        await trio.sleep(5)
        await validator.start(resume=True)
        await trio.sleep(5)


async def validators_part(simulation: Simulation) -> None:
    """Neither hears of the other's acknowledgements."""
    first, second = (simulation.peers[name].id for name in VALIDATORS)
    for other in (first, simulation.peers["trainer"].id, simulation.peers["bootstrap"].id):
        simulation.network.cut(second, other)
    await trio.sleep(20)
    for other in (first, simulation.peers["trainer"].id, simulation.peers["bootstrap"].id):
        simulation.network.heal(second, other)


async def nothing(simulation: Simulation) -> None:
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("disturb", "prefill_tokens_per_second"),
    [
        (worker_crashes, 40_000.0),
        pytest.param(connection_breaks, 40_000.0, marks=pytest.mark.slow),
        (validators_restart, 40_000.0),
        (validators_part, 40_000.0),
        (nothing, 60.0),
    ],
    ids=["crashes", "reconnects", "validators-restart", "validators-part", "slow-validator"],
)
async def test_every_number_is_judged_and_accepted(
    disturb: Disturb, prefill_tokens_per_second: float
) -> None:
    simulation = Simulation(3, workload=Workload(model_bytes=500_000, completion_tokens_mean=32))
    made: dict[tuple[int, int], float] = {}
    judged: dict[tuple[int, int], str] = {}
    wastes: list[Any] = []

    def hear(now: float, _: Peer, event: Event) -> None:
        fields = event.fields
        if event.name == "inference.submission_made":
            made.setdefault((fields["step"], fields["number"]), now)
        elif event.name in ("validator.verdict", "validator.turned_down"):
            number = (fields["step"], fields["number"])
            assert judged.setdefault(number, fields["failed"]) == fields["failed"]

    simulation.listeners.append(hear)
    slow = Hardware(prefill_tokens_per_second=prefill_tokens_per_second)
    async with going(
        simulation,
        Plan("v0", ["validator"], hardware=slow),
        Plan("v1", ["validator"]),
        Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=1.0)),
        Plan("w", ["inference"], hardware=Hardware(tokens_per_second=600.0)),
        groups_per_submission=1,
        max_new_tokens=128,
        limits=LIMITS,
    ):
        await trio.sleep_until(DISTURBED_FROM)
        await disturb(simulation)
        assert simulation.now() < CALM_AGAIN
        await trio.sleep_until(END)
        for name in VALIDATORS:
            role = simulation.peers[name].roles[0]
            assert isinstance(role, ValidatorRole)
            wastes.extend(each.count for each in role._penalties._wastes.values())
    assert set(judged.values()) == {""}, "everything is accepted"
    assert max(wastes, default=0) == 0
    missing = [
        number for number, when in made.items() if when < CALM_AGAIN and number not in judged
    ]
    assert missing == []
    assert max(made.values()) > END - 10, "it goes on"
    assert len(judged) > 40
