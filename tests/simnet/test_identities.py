"""One machine with a crowd of identities that take places and deliver nothing."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import trio

from simnet.adversaries.identities import IdleIdentities
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.simulation import Plan, Simulation
from swarm.wire.manifest import Admissions
from tests.simnet.runs import going

ADMISSIONS = Admissions(unproven_max=24, helpers_max=24, range_max=6)
TRUSTED = ("trainer", "v0")


class Watchers(IdleIdentities):
    roles: ClassVar[list[str]] = ["observer"]


def seconds_to_the_end(acts: type[IdleIdentities] | None) -> float:
    """Virtual seconds of a run whose workers come after the crowd, if there is one."""
    took: list[float] = []
    simulation = Simulation(7, workload=Workload(model_bytes=3_000_000, completion_tokens_mean=64))

    async def main() -> None:
        over = simulation.expect("trainer.run_complete", ["trainer"])
        async with going(
            simulation,
            Plan("v0", ["validator"]),
            Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=5.0)),
            steps=6,
            admissions=ADMISSIONS,
        ) as peers:
            if acts is not None:
                acts.admitted.clear()
                await simulation.add(Plan("crowd", ["relay"], acts=acts)).start()
                await trio.sleep(30)
            began = simulation.now()
            for number in range(3):
                await simulation.add(Plan(f"w{number}", ["inference"])).start()
            assert await simulation.meet(over, 600.0)
            took.append(simulation.now() - began)
            for name in TRUSTED if acts is not None else ():
                part: Any = peers[name].part._trusted  # type: ignore[union-attr]
                assert len(part.registrar._members.own) <= 2 * 24 + 3
                raw = b"".join(part._log.entries(0, 10_000))
                assert not any(key.encode() in raw for key in acts.admitted), "they leave no trace"  # type: ignore[union-attr]

    run_virtual(main, seed=7, limit_seconds=3600)
    return took[0]


@pytest.mark.parametrize("acts", [IdleIdentities, pytest.param(Watchers, marks=pytest.mark.slow)])
def test_a_run_keeps_its_pace_beside_a_crowd_of_identities(acts: type[IdleIdentities]) -> None:
    beside = seconds_to_the_end(acts)
    assert 0 < len(acts.admitted) <= 2 * 2 * ADMISSIONS.range_max
    assert seconds_to_the_end(None) > 0.9 * beside
