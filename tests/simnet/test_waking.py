"""A laptop that slept comes back and works."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.faults import Freeze
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.world.observable import Observable
from tests.simnet.runs import going

RUNNER = partial(run_virtual, seed=5)

ASLEEP_SECONDS = 900.0
"""Longer than verdicts, events and admissions last."""
WORKING_AGAIN_SECONDS = 180.0


@pytest.mark.slow
async def test_a_worker_that_slept_connects_again_and_works() -> None:
    simulation = Simulation(5, workload=Workload(completion_tokens_mean=16))
    events: list[tuple[float, str]] = []
    done: list[bool] = []
    changed: Observable[None] = Observable(None)

    def hear(now: float, peer: Peer, event: Event) -> None:
        if peer.name == "laptop":
            events.append((now, event.name))
            changed.touch()

    async def until(name: str, since: float) -> float:
        await changed.wait_until(lambda _: any(at > since and each == name for at, each in events))
        return min(at for at, each in events if at > since and each == name)

    simulation.listeners.append(hear)
    async with going(
        simulation,
        Plan("validator", ["validator"]),
        Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=60.0)),
        Plan("other", ["inference"]),
        Plan("laptop", ["inference"]),
        steps=10_000,
        groups_per_step=16,
        max_new_tokens=32,
    ):
        await until("inference.receipt", 0.0)
        # A frozen peer's own timers go on, those of a sleeping one stand still; so its clock is
        # set back meanwhile, and the time jumps once it is awake.
        laptop = simulation.peers["laptop"]
        laptop.step_clock(-ASLEEP_SECONDS)
        laptop.disk.asleep = True
        await Freeze(at=0.0, peers=["laptop"], seconds=ASLEEP_SECONDS).happen(simulation)
        laptop.disk.asleep = False
        laptop.step_clock(ASLEEP_SECONDS)
        woken = simulation.now()
        with trio.fail_after(WORKING_AGAIN_SECONDS):
            await until("inference.receipt", woken)
        done.append(True)
    assert done
