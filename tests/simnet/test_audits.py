"""Accepted submissions that were not recomputed are audited while the validator is idle."""

from __future__ import annotations

from functools import partial
from typing import Any

import trio

from peers.inference.role import InferenceRole
from peers.validator.role import ValidatorRole
from simnet.adversaries import disguise
from simnet.clock import run_virtual
from simnet.compute.setting import Fabricates, Hardware
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.node.run_node import RunNode
from swarm.wire.manifest import Thresholds
from tests.simnet.runs import SMALL, going

RUNNER = partial(run_virtual, seed=1)

END_SECONDS = 90.0
LIAR = "w0"
HONEST_STEPS = 3


def run(
    thresholds: Thresholds, *, kind: str = "", fabricates: Fabricates = ""
) -> tuple[int, list[tuple[str, Any]]]:
    """The evictions and the validator's events of a run with two workers, the first of which is
    an adversary of some kind, or fabricates its work."""
    simulation = Simulation(1, workload=SMALL)
    seen: list[tuple[str, Any]] = []
    evictions = 0

    def hear(_now: float, peer: Peer, event: Event) -> None:
        if peer.name == "v0" and event.name.startswith("validator."):
            seen.append((event.name, event.fields))

    async def main() -> None:
        nonlocal evictions
        simulation.listeners.append(hear)
        liar = Plan(LIAR, ["inference"])
        if kind:
            liar = disguise(liar, kind)
        elif fabricates:
            liar = Plan(LIAR, ["inference"], acts=InferenceRole, fabricates=fabricates)
        async with going(
            simulation,
            Plan("v0", ["validator"]),
            Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=3.0)),
            liar,
            Plan("w1", ["inference"]),
            groups_per_step=16,
            thresholds=thresholds,
        ):
            await trio.sleep_until(END_SECONDS)
            evictions = simulation.evictions()

    run_virtual(main, seed=1, limit_seconds=END_SECONDS + 1)
    return evictions, seen


def rarely(audit_share: float) -> Thresholds:
    """A worker with any stake is hardly ever recomputed at once."""
    return Thresholds(
        recompute_safety=1.0, recompute_share_min=0.001, audit_share=audit_share, measured_tokens=1
    )


def test_honest_work_is_audited_once_and_nothing_else_changes() -> None:
    evictions, seen = run(rarely(1.0))
    assert evictions == 0
    judged = [fields for name, fields in seen if name == "validator.verdict"]
    audited = [fields for name, fields in seen if name == "validator.audited"]
    assert {fields["outcome"] for fields in judged} == {"accepted"}
    assert len(audited) > 5
    assert {fields["outcome"] for fields in audited} == {"accepted"}
    assert len({fields["submission"] for fields in audited}) == len(audited)


def test_a_lie_that_was_accepted_is_found_by_its_audit() -> None:
    """In one row, which the sample of a few rows misses most of the time."""
    evictions, seen = run(
        rarely(1.0), fabricates=lambda order: "row" if order.step >= HONEST_STEPS else ""
    )
    refused = [
        fields["worker"]
        for name, fields in seen
        if name == "validator.audited" and fields["outcome"] == "refused"
    ]
    assert len(refused) == evictions == 1, "the first refusal evicts"


async def test_a_validator_that_is_killed_before_an_audit_performs_it_after_its_restart() -> None:
    simulation = Simulation(1, workload=SMALL)
    lives: list[ValidatorRole] = []
    audited: set[bytes] = set()
    enough = trio.Event()

    slow = Hardware(prefill_tokens_per_second=500.0)  # so that cases wait, and audits with them

    class Noted(ValidatorRole):
        def __init__(self, peer: RunNode) -> None:
            super().__init__(peer)
            lives.append(self)

    def hear(_now: float, _peer: Peer, event: Event) -> None:
        if event.name == "validator.verdict" and lives[0]._audits._drawn:
            enough.set()
        elif event.name == "validator.audited":
            assert event.fields["submission"] not in audited, "audited twice"
            audited.add(event.fields["submission"])

    simulation.listeners.append(hear)
    async with going(
        simulation,
        Plan("v0", ["validator"], acts=Noted, hardware=slow),
        Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=30.0)),
        Plan("w0", ["inference"]),
        Plan("w1", ["inference"]),
        groups_per_step=16,
        thresholds=rarely(1.0),
    ):
        await enough.wait()
        waiting = {case.submission.digest for case, _ in lives[0]._audits._drawn}
        await simulation.peers["v0"].kill()
        assert not waiting & audited
        await simulation.peers["v0"].start(resume=True)
        with trio.move_on_after(60):
            while not waiting <= audited:  # noqa: ASYNC110 (virtual time)
                await trio.sleep(1)
        assert waiting <= audited
