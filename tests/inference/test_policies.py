"""Which policy a worker fetches: the one its step order names, then the newest."""

from __future__ import annotations

import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.lines import Line
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event

SLOW_LINE = Line(downlink_bytes_per_second=500_000.0)
"""Takes 6 s for a policy."""
ARRIVED, COMPLETE = "shardcast.piece_received", "shardcast.checkpoint_complete"


def test_a_newcomer_fetches_the_policy_it_needs_before_the_newest() -> None:
    simulation = Simulation(5, workload=Workload(model_bytes=3_000_000, completion_tokens_mean=64))
    fetched: list[tuple[str, int]] = []
    """What the newcomer's fetches say, and of which policy."""

    def hear(_: float, peer: Peer, event: Event) -> None:
        if peer.name == "inference-new" and event.name in (ARRIVED, COMPLETE):
            fetched.append((event.name, event.fields["step"]))

    async def main() -> None:
        async with simulation.running():
            await start_bootstrap(
                simulation, trainers=["trainer"], validators=["validator"], groups_per_step=8,
                max_new_tokens=256,
            )  # fmt: skip
            for name in ["validator", "trainer", "inference"]:
                hardware = Hardware(step_seconds=20.0)
                await simulation.add(Plan(name, [name], hardware=hardware)).start()
            await trio.sleep(160)  # just after policy 8 was published, while 7 is used
            simulation.listeners.append(hear)
            plan = Plan("inference-new", ["inference"], line=SLOW_LINE)
            await simulation.add(plan).start()
            loaded = simulation.expect("inference.policy_loaded", ["inference-new"])
            assert await simulation.meet(loaded, 200)

    run_virtual(main, seed=5, limit_seconds=600)
    first = next(step for name, step in fetched if name == COMPLETE)
    begun, complete = fetched.index((ARRIVED, first)), fetched.index((COMPLETE, first))
    assert {step for _, step in fetched[begun:complete]} == {first}
    assert not simulation.violations
