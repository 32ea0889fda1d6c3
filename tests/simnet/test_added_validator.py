"""A validator that is added to a run, or comes late to it, while workers deliver."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.simulation import Plan, Simulation
from swarm.events import Event
from tests.simnet.runs import going

RUNNER = partial(run_virtual, seed=5)


@pytest.mark.slow
async def test_a_second_validator_judges_at_once_and_workers_keep_their_calm() -> None:
    """Its children take seconds to start: what is pushed meanwhile must not use up the quota."""
    heard: list[tuple[float, str, Event]] = []
    late = 40.0
    hardware = Hardware(tokens_per_second=10_000.0, step_seconds=4.0)

    simulation = Simulation(5, workload=Workload(3_000_000, completion_tokens_mean=64))
    simulation.listeners.append(lambda now, peer, event: heard.append((now, peer.name, event)))
    async with going(
        simulation,
        Plan("v1", ["validator"], hardware=hardware),
        Plan("trainer", ["trainer"], hardware=hardware),
        Plan("worker", ["inference"], hardware=hardware),
        validators=["v1", "v2"],
        groups_per_step=64,
    ):
        await trio.sleep_until(late)
        await simulation.add(Plan("v2", ["validator"], hardware=hardware)).start()
        await trio.sleep_until(late + 20)
    verdicts = [
        (now, event.fields)
        for now, name, event in heard
        if name == "v2" and event.name == "validator.verdict"
    ]
    assert verdicts and verdicts[0][0] < late + 10  # 6 s of them for its children
    assert len(verdicts) > 20
    assert {fields["outcome"] for _, fields in verdicts} == {"accepted"}
    failed = [event.fields for _, name, event in heard if event.name == "inference.delivery_failed"]
    assert not [fields for fields in failed if "429" in fields["reason"]]
    assert sum(fields["times"] for fields in failed) > len(failed), "each time is counted"
    assert len(failed) <= 2 * 2, "it speaks of each validator twice a minute"
