"""A trusted peer that restarts in an old run goes on within seconds, however much was announced."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from tests.simnet.runs import SMALL, going

RUNNER = partial(run_virtual, seed=1)

SUBMISSIONS = 2_500
GROUPS_PER_STEP = 128
WORKERS = 4
DOWN_SECONDS = 2.0
GOING_AGAIN_SECONDS = 10.0
"""Of them 3 for each child of a peer to start, one after the other."""


@pytest.mark.slow
async def test_the_next_step_is_made_soon_after_a_trusted_peer_restarts() -> None:
    simulation = Simulation(1, workload=SMALL)
    accepted: set[bytes] = set()
    old, stepped = trio.Event(), trio.Event()
    waited: dict[str, float] = {}

    def hear(_now: float, _peer: Peer, event: Event) -> None:
        if event.name == "validator.verdict" and event.fields["outcome"] == "accepted":
            accepted.add(event.fields["submission"])
            if len(accepted) >= SUBMISSIONS:
                old.set()
        elif event.name == "trainer.step_trained":
            stepped.set()

    simulation.listeners.append(hear)
    checker, learner = Hardware(prefill_tokens_per_second=1e6), Hardware(step_seconds=0.5)
    worker = Hardware(tokens_per_second=32_000.0)
    async with going(
        simulation,
        Plan("v0", ["validator"], hardware=checker),
        Plan("trainer", ["trainer"], hardware=learner),
        *(Plan(f"w{n}", ["inference"], hardware=worker) for n in range(WORKERS)),
        steps=100_000,
        groups_per_step=GROUPS_PER_STEP,
    ):
        await old.wait()
        for name in ("v0", "trainer"):
            peer = simulation.peers[name]
            await peer.kill()
            await trio.sleep(DOWN_SECONDS)
            begun = simulation.now()
            await peer.start(resume=True)
            stepped = trio.Event()
            with trio.move_on_after(10 * GOING_AGAIN_SECONDS):
                await stepped.wait()
            waited[name] = simulation.now() - begun
            await trio.sleep(GOING_AGAIN_SECONDS)
    assert waited["v0"] < GOING_AGAIN_SECONDS
    assert waited["trainer"] < GOING_AGAIN_SECONDS
