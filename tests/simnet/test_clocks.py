"""Whole runs in which the clock of a trusted peer is off: they go on."""

from __future__ import annotations

import pytest

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.simulation import Plan, Simulation
from tests.simnet.runs import going

STEPS = 4


def seconds_to_the_end(off: dict[str, float], *, restarted: float = 0.0) -> float:
    """Virtual seconds that a run of one trainer and one validator takes; with `restarted`, its
    validator comes back with a clock that is so far off."""
    took: list[float] = []
    steps = STEPS if not restarted else 3 * STEPS
    simulation = Simulation(3, workload=Workload(model_bytes=3_000_000, completion_tokens_mean=64))

    async def main() -> None:
        over = simulation.expect("trainer.run_complete", ["trainer"])
        trained = simulation.expect("trainer.step_trained", ["trainer"])
        async with going(
            simulation,
            Plan("v0", ["validator"], skew_seconds=off.get("v0", 0.0)),
            Plan(
                "trainer", ["trainer"], hardware=Hardware(step_seconds=5.0),
                skew_seconds=off.get("trainer", 0.0),
            ),
            *[Plan(f"w{number}", ["inference"]) for number in range(2)],
            steps=steps,
        ) as peers:  # fmt: skip
            if restarted:
                assert await simulation.meet(trained, 600.0)
                await peers["v0"].kill()
                peers["v0"].step_clock(restarted)
                await peers["v0"].start()
            assert await simulation.meet(over, 900.0), "steps are made"
            took.append(simulation.now())

    run_virtual(main, seed=3, limit_seconds=3600)
    return took[0]


@pytest.mark.parametrize("seconds", [600.0, -600.0])
@pytest.mark.parametrize("who", ["trainer", "v0"])
def test_one_trainer_and_one_validator_that_disagree_go_on(who: str, seconds: float) -> None:
    assert seconds_to_the_end({who: seconds}) < 1.5 * seconds_to_the_end({})


@pytest.mark.parametrize("seconds", [600.0, -600.0])
def test_a_validator_that_comes_back_with_a_wrong_clock_goes_on(seconds: float) -> None:
    seconds_to_the_end({}, restarted=seconds)
