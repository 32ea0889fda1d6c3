"""Validators with more to judge than they can: what one has done the others leave."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.wire.manifest import Limits, Thresholds
from tests.simnet.runs import SMALL, going

RUNNER = partial(run_virtual, seed=1)

VALIDATORS = ["v0", "v1"]
WORKERS = ["w0", "w1", "w2", "w3"]
CUT_SECONDS = 47.0
END_SECONDS = 110.0
GOSSIP_SECONDS = 1.0
"""A verdict is heard of by then."""


async def test_what_another_validator_accepted_is_not_judged_again() -> None:
    """The same submission waits in two queues as soon as its first verdict is late. From a moment
    on one validator and the workers cannot speak: the other passes its verdicts on."""
    simulation = Simulation(1, workload=SMALL)
    accepted: dict[bytes, dict[str, float]] = defaultdict(dict)
    begun: list[tuple[str, bytes, float]] = []
    left: list[bytes] = []
    kept: list[str] = []
    """Files of theirs."""
    receipts: dict[str, list[bytes]] = defaultdict(list)

    def hear(now: float, peer: Peer, event: Event) -> None:
        fields = event.fields
        if event.name == "validator.verdict" and fields["outcome"] == "accepted":
            if not fields["second"]:  # v0, which comes first in rank, looks after what skipped it
                begun.append((peer.name, fields["submission"], now - fields["seconds"]))
            accepted[fields["submission"]][peer.name] = now
        elif event.name == "validator.settled_elsewhere":
            left.append(fields["submission"])
            kept.extend(
                name
                for name in peer.disk.list("incoming")
                if name.startswith(fields["submission"].hex())
            )
        elif event.name == "inference.receipt" and now > CUT_SECONDS + GOSSIP_SECONDS:
            receipts[fields["by"]].append(fields["submission"])

    simulation.listeners.append(hear)
    slow, quick = Hardware(prefill_tokens_per_second=300.0), Hardware(step_seconds=12.0)
    async with going(
        simulation,
        *(Plan(name, ["validator"], hardware=slow) for name in VALIDATORS),
        Plan("trainer", ["trainer"], hardware=quick),
        *(Plan(name, ["inference"]) for name in WORKERS),
        groups_per_step=16,
        limits=Limits(verdict_seconds=2.5),  # waited for four times
        thresholds=Thresholds(second_share=0.0, measured_tokens=1),
    ):
        await trio.sleep_until(CUT_SECONDS)
        for worker in WORKERS:
            simulation.network.cut(simulation.peers["v0"].id, simulation.peers[worker].id)
        await trio.sleep_until(END_SECONDS)
    assert len(left) > 5
    assert kept == []
    assert receipts[simulation.peers["v0"].id]
    for name, submission, since in begun:
        for other, when in accepted[submission].items():
            assert other == name or since < when + GOSSIP_SECONDS
