"""Validators check each other: one that lies is contradicted, and the events name it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio

from peers.inference.role import InferenceRole
from peers.validator.cases import Case, Outcome
from peers.validator.examiner import Examiner
from peers.validator.role import ValidatorRole
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.jobs.validation import Judge, PrefillService
from swarm.node.run_node import RunNode
from swarm.node.trusted import VERDICT_LIFETIME_SECONDS
from swarm.wire.manifest import Thresholds
from swarm.wire.messages import Evidence
from tests.simnet.runs import SMALL, going

RUNNER = partial(run_virtual, seed=3)

VALIDATORS = ["v0", "v1", "v2"]
LIAR = "v0"
VICTIM = "w0"
WORKERS = [f"w{number}" for number in range(8)]
HONEST = "w7"
SECONDS = 60.0


class Credulous(Examiner):
    """Claims to recompute, and never does."""

    async def _recompute(
        self, case: Case, job: Judge, prefill: PrefillService, outcome: Outcome
    ) -> Any:
        outcome.evidence = Evidence(tokens=100, sampler=[0], policy=[0], text=[0], selection=[0])


class Spiteful(Examiner):
    """Refuses whatever one worker makes, with an invented figure."""

    victim = ""

    async def _recompute(
        self, case: Case, job: Judge, prefill: PrefillService, outcome: Outcome
    ) -> Any:
        judged = await super()._recompute(case, job, prefill, outcome)
        if job.order.worker == self.victim:
            outcome.failed, outcome.detail = "proofs", "invented"
        return judged


def lying(examiner: type[Examiner]) -> type[ValidatorRole]:
    class Liar(ValidatorRole):
        def __init__(self, peer: RunNode) -> None:
            super().__init__(peer)
            self._examiner.__class__ = examiner

    return Liar


def run(
    liar: type[ValidatorRole] | None, share: float, fabricates: str = ""
) -> tuple[Simulation, list[tuple[str, Event]]]:
    simulation = Simulation(3, workload=SMALL)
    Spiteful.victim = simulation.identity(VICTIM).peer_id
    said: list[tuple[str, Event]] = []
    simulation.listeners.append(lambda _, peer, event: said.append((peer.name, event)))

    async def main() -> None:
        # Slow, so that the second opinion on a file comes before the next one evicts.
        slow = Hardware(tokens_per_second=250.0)
        cheat = Plan("", ["inference"], acts=InferenceRole, fabricates=fabricates, hardware=slow)
        async with going(
            simulation,
            *(
                Plan(name, ["validator"], acts=liar if name == LIAR else None)
                for name in VALIDATORS
            ),
            Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=8.0)),
            *(
                replace(cheat, name=name)
                if fabricates and name != HONEST
                else Plan(name, ["inference"])
                for name in WORKERS
            ),
            groups_per_step=16,
            thresholds=Thresholds(second_share=share, measured_tokens=1),
        ):
            await trio.sleep_until(SECONDS)

    run_virtual(main, seed=3, limit_seconds=SECONDS + 1)
    return simulation, said


def contradictions(simulation: Simulation, said: list[tuple[str, Event]]) -> Counter[str]:
    """How often each validator was contradicted, in the words of the trainer."""
    names = {simulation.identity(name).peer_id: name for name in VALIDATORS}
    return Counter(
        names[event.fields[side]]
        for name, event in said
        if name == "trainer" and event.name == "verdicts.contradict"
        for side in ("refuses", "accepts")
    )


def judged(said: list[tuple[str, Event]]) -> Counter[bytes]:
    return Counter(
        event.fields["submission"] for _, event in said if event.name == "validator.verdict"
    )


@pytest.mark.parametrize(("share", "twice"), [(0.0, 0.0), (1.0, 0.6)])
def test_honest_validators_agree_and_a_share_of_submissions_is_judged_twice(
    share: float, twice: float
) -> None:
    simulation, said = run(None, share)
    assert not contradictions(simulation, said)
    counts = judged(said)
    assert len(counts) > 20
    assert sum(count > 1 for count in counts.values()) >= twice * len(counts)
    assert twice or max(counts.values()) == 1
    assert {e.fields["outcome"] for _, e in said if e.name == "validator.verdict"} == {"accepted"}
    failed = [e.fields["reason"] for _, e in said if e.name == "validator.second_opinion_failed"]
    assert not failed


def test_a_validator_that_accepts_everything_is_contradicted() -> None:
    simulation, said = run(lying(Credulous), share=1.0, fabricates="weights")
    found = contradictions(simulation, said)
    assert found[LIAR] > 0
    assert found[LIAR] >= max(found.values()), "it takes part in every contradiction"
    evicted = {e.fields["remote"] for _, e in said if e.name == "membership.peer_evicted"}
    assert evicted == {simulation.identity(name).peer_id for name in WORKERS if name != HONEST}


@pytest.mark.slow
def test_a_validator_that_refuses_one_worker_is_contradicted() -> None:
    simulation, said = run(lying(Spiteful), share=1.0)
    found = contradictions(simulation, said)
    assert found[LIAR] > 0 and found[LIAR] == sum(found.values()) / 2
    about = {event.fields["worker"] for _, event in said if event.name == "verdicts.contradict"}
    assert about == {simulation.identity(VICTIM).peer_id}


@pytest.mark.slow
async def test_a_second_opinion_is_given_after_a_restart() -> None:
    """A validator is killed as soon as another one has judged, and before it checks that."""
    simulation = Simulation(3, workload=SMALL)
    by: dict[str, set[bytes]] = {"v0": set(), "v1": set()}
    enough = trio.Event()

    def hear(_now: float, peer: Peer, event: Event) -> None:
        if event.name == "validator.verdict":
            by[peer.name].add(event.fields["submission"])
            if len(by["v0"] - by["v1"]) == 4:
                enough.set()

    simulation.listeners.append(hear)
    slow = Hardware(prefill_tokens_per_second=500.0)
    async with going(
        simulation,
        Plan("v0", ["validator"]),
        Plan("v1", ["validator"], hardware=slow),
        Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=3000.0)),
        *(Plan(name, ["inference"]) for name in WORKERS[:3]),
        groups_per_step=16,
        thresholds=Thresholds(second_share=1.0, measured_tokens=1),
    ):
        await enough.wait()
        waiting = by["v0"] - by["v1"]
        await trio.sleep(3)  # v1 mirrors the log of v0
        await simulation.peers["v1"].kill()
        await trio.sleep(VERDICT_LIFETIME_SECONDS)  # so that gossip does not repeat them
        before = waiting - by["v1"]
        assert before
        await simulation.peers["v1"].start(resume=True)
        with trio.move_on_after(120):
            while not before <= by["v1"]:  # noqa: ASYNC110 (virtual time)
                await trio.sleep(1)
        assert before <= by["v1"]
