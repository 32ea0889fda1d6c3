"""Whoever has nothing to work on says so after half a minute: why, and for whom it waits."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Workload
from simnet.lines import Line
from simnet.simulation import Plan, Simulation
from swarm.events import Event, Lines
from tests.simnet.runs import going

SMALL = Workload(model_bytes=3_000_000, completion_tokens_mean=64)
TRAINER, VALIDATOR = Plan("trainer", ["trainer"]), Plan("v0", ["validator"])
WORKER = Plan("w0", ["inference"])


def said(*plans: Plan) -> list[str]:
    """What validator and worker print at default verbosity within 70 s, of starving."""
    simulation = Simulation(1, workload=SMALL)
    printed = io.StringIO()
    show = Lines(printed)

    def hear(_now: float, _peer: object, event: Event) -> None:
        if event.name.endswith(".starved"):
            show(event)

    async def main() -> None:
        simulation.listeners.append(hear)
        async with going(
            simulation, *plans, trainers=["trainer"], validators=["v0"], groups_per_step=32,
            max_new_tokens=4096,
        ):  # fmt: skip
            await trio.sleep(70)

    run_virtual(main, seed=1, limit_seconds=100)
    return printed.getvalue().splitlines()


def test_without_a_trainer_worker_and_validator_wait_for_its_order() -> None:
    lines = said(VALIDATOR, WORKER)
    assert len(lines) == 4, "each twice"
    for line in lines:
        assert "nothing to do for" in line and "no step order has come; waiting for …" in line
        assert line.endswith(" (not connected)")


def test_without_workers_the_validator_says_that_nobody_hands_anything_in() -> None:
    lines = said(VALIDATOR, TRAINER)
    reason = "step 0 wants 32 groups, but no submission arrives, and no inference peer is there"
    assert any(reason in s for s in lines)
    assert any(
        "waited 30 s for 32 groups (0 are not judged yet) from any infer" in s for s in lines
    )


def test_a_worker_without_the_policy_says_how_much_of_it_is_here() -> None:
    slow = replace(TRAINER, line=Line("us-east", 30_000.0))
    assert any(
        re.search(
            "of policy 0, which step 0 uses, (no piece has|[0-9]+ of [0-9]+ pieces have) arrived",
            line,
        )
        for line in said(VALIDATOR, slow, WORKER)
    )
