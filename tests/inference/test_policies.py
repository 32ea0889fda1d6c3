"""Which policy a worker fetches: the one its step order names, then the newest."""

from __future__ import annotations

import trio

from simnet.lines import Line
from simnet.simulation import Peer, Plan
from swarm.events import Event
from tests.trainer.runs import RUN, simulated, start_run

RUNNER = RUN
SLOW_LINE = Line(downlink_bytes_per_second=500_000.0)
"""Takes 6 s for a policy."""
ARRIVED, COMPLETE = "shardcast.piece_received", "shardcast.checkpoint_complete"


async def test_a_newcomer_fetches_the_policy_it_needs_before_the_newest() -> None:
    fetched: list[tuple[str, int]] = []
    """What the newcomer's fetches say, and of which policy."""

    def hear(_: float, peer: Peer, event: Event) -> None:
        if peer.name == "inference-new" and event.name in (ARRIVED, COMPLETE):
            fetched.append((event.name, event.fields["step"]))

    async with simulated() as (simulation, _):
        names = ("validator", "trainer", "inference")
        await start_run(simulation, *names, steps=1000, step_seconds=20.0)
        await trio.sleep(160)  # just after policy 8 was published, while 7 is used
        simulation.listeners.append(hear)
        plan = Plan("inference-new", ["inference"], line=SLOW_LINE)
        await simulation.add(plan).start()
        loaded = simulation.expect("inference.policy_loaded", ["inference-new"])
        assert await simulation.meet(loaded, 200)
    first = next(step for name, step in fetched if name == COMPLETE)
    begun, complete = fetched.index((ARRIVED, first)), fetched.index((COMPLETE, first))
    assert {step for _, step in fetched[begun:complete]} == {first}
