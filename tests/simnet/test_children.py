"""Compute children die: their roles start them again, and nothing is lost or done twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

import pytest
import trio

from simnet.clock import run_virtual
from simnet.compute.children import SimulatedChild, SimulatedCompute
from simnet.compute.setting import Hardware, Workload
from simnet.disk import SimulatedDisk
from simnet.invariants import Invariants
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.world import ChildDied, ChildError, Job, restarts

RUNNER = partial(run_virtual, seed=1)

STEPS = 4
SLOW = Hardware(step_seconds=5.0)
"""Half a second into a step it is being made."""


class Killings:
    """Kills a child half a second after chosen ones of its peer's words."""

    def __init__(self, simulation: Simulation, child: str, doing: str, times: Sequence[int]):
        self._simulation, self._child, self._doing = simulation, child, doing
        self._times = times
        self._count = 0
        simulation.listeners.append(self._hear)

    def _hear(self, _: float, peer: Peer, event: Event) -> None:
        if event.name == "peer.status" and event.fields["doing"].startswith(self._doing):
            self._count += 1
            if self._count in self._times:
                self._simulation.nursery.start_soon(self._kill, peer)

    async def _kill(self, peer: Peer) -> None:
        await trio.sleep(0.5)
        assert peer.node is not None and isinstance(peer.node.compute, SimulatedCompute)
        if self._child in peer.node.compute.children:
            peer.node.compute.children[self._child].die()


class Story:
    """A run of a trainer, a validator and these workers; what was said."""

    def __init__(
        self,
        *plans: Plan,
        killings: tuple[str, str, Sequence[int]] | None = None,
        tables: Mapping[str, dict[str, Any]] = {},
        judges_on: Hardware | None = None,
    ) -> None:
        self.said: list[Event] = []
        self.simulation = Simulation(
            3, workload=Workload(model_bytes=3_000_000, completion_tokens_mean=64)
        )
        self.simulation.listeners.append(lambda _, peer, event: self.said.append(event))
        if killings is not None:
            Killings(self.simulation, *killings)
        self._plans = [
            Plan("validator", ["validator"], hardware=judges_on or Hardware()),
            Plan("trainer", ["trainer"], hardware=SLOW),
            *plans,
        ]
        for plan in self._plans:
            plan.tables = {role: tables[role] for role in plan.roles if role in tables}

    def run(self, until: str = "trainer.run_complete", of: str = "trainer", times: int = 1) -> None:
        async def main() -> None:
            async with self.simulation.running():
                Invariants(self.simulation)
                await start_bootstrap(
                    self.simulation, trainers=["trainer"], validators=["validator"], steps=STEPS,
                    groups_per_step=8, max_new_tokens=256,
                )  # fmt: skip
                met = self.simulation.expect(until, [of], lambda _: len(self.of(until)) >= times)
                for plan in self._plans:
                    await self.simulation.add(plan).start()
                assert await self.simulation.meet(met, 1800)

        run_virtual(main, seed=3, limit_seconds=3600)

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event.fields for event in self.said if event.name == name]


WORKER = Plan("inference-1", ["inference"])


@pytest.mark.parametrize(
    ("child", "doing"),
    [
        ("trainer", "training"),
        ("engine", "generating"),
        ("prefill", "judging"),
        ("inspector", "judging"),
    ],
)
def test_a_child_that_dies_is_started_again_and_its_work_is_done_over(
    child: str, doing: str
) -> None:
    # Every third time: a restarted engine begins two submissions, and must end one of them.
    story = Story(WORKER, killings=(child, doing, range(1, 20, 3)))
    story.run()
    assert not story.simulation.violations
    assert [f["deaths"] for f in story.of("compute.child_restarted")][:1] == [1]
    assert {fields["outcome"] for fields in story.of("validator.verdict")} == {"accepted"}
    assert [fields["step"] for fields in story.of("trainer.step_trained")] == list(range(STEPS))


def test_a_file_that_kills_its_reader_is_quarantined_and_ends_nobody() -> None:
    story = Story(Plan("inference-1", ["inference"], fabricates="poison"))
    story.run("validator.verdict", "validator", times=restarts.DEATHS_MAX)
    assert not story.simulation.violations
    assert {fields["outcome"] for fields in story.of("validator.verdict")} == {"quarantined"}
    assert "3 attempts to check it failed here" in story.of("validator.verdict")[0]["detail"]
    restarted = [fields["deaths"] for fields in story.of("compute.child_restarted")]
    assert len(restarted) > restarts.DEATHS_MAX and set(restarted) == {1, 2, 3}


@pytest.mark.parametrize(
    ("judges_on", "deaths"),
    [(Hardware(load_bytes_per_second=1e6), 3), (Hardware(prefill_tokens_per_second=100.0), 2)],
    ids=["whenever it loads", "twice as it judges"],
)
def test_children_that_die_for_reasons_of_the_machine_are_no_fault_of_a_submission(
    judges_on: Hardware, deaths: int
) -> None:
    killings = ("prefill", "judging", range(1, deaths + 2))
    story = Story(WORKER, killings=killings, judges_on=judges_on)
    story.run("validator.verdict", "validator")
    (verdict,) = story.of("validator.verdict")
    assert len(story.of("compute.child_restarted")) == deaths
    assert (verdict["outcome"], verdict["failed"]) == ("accepted", "")


def test_a_grader_that_hangs_costs_no_worker_its_credit() -> None:
    story = Story(WORKER, judges_on=Hardware(hangs=True))
    story.run("validator.verdict", "validator")
    (verdict,) = story.of("validator.verdict")
    assert (verdict["outcome"], verdict["failed"]) == ("quarantined", "environment")
    assert verdict["detail"] == "environment 'simulated' took too long"
    assert len(story.of("compute.child_restarted")) == 1, "it is asked once only"


def test_a_child_that_always_dies_ends_its_peer_after_so_many_deaths_in_a_row() -> None:
    story = Story(WORKER, killings=("trainer", "training", range(100)))
    story.run()
    assert len(story.of("trainer.step_trained")) == 0
    restarted = [fields["deaths"] for fields in story.of("compute.child_restarted")]
    assert restarted == list(range(1, restarts.DEATHS_MAX))
    assert "trainer ended: trainer was killed" in story.simulation.violations[0]


class Count(Job, frozen=True):
    to: int


class Counter:
    """A cost model that counts, a number per second, and cannot count beyond 3."""

    async def count(self, job: Count) -> int:
        await trio.sleep(job.to)
        if job.to > 3:
            raise ValueError("too many")
        return job.to

    async def nothing(self) -> None:
        await trio.sleep(1.0)


async def die(child: SimulatedChild) -> None:
    await trio.sleep(1.0)
    child.die()


async def test_a_cost_model_works_until_it_ends_fails_or_dies() -> None:
    child = SimulatedChild("counter", Counter(), SimulatedDisk())
    assert await child.request("count", Count(to=3), int) == 3
    assert trio.current_time() == 3.0
    await child.request("nothing", Job(), NoneType)
    with pytest.raises(ChildError, match="too many"):
        await child.request("count", Count(to=9), int)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(die, child)
        with pytest.raises(ChildDied, match="counter was killed"):
            await child.request("count", Count(to=3), int)


def test_every_child_of_a_role_runs_under_the_interpreter_of_its_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: dict[str, Any] = {}
    real = SimulatedCompute.child

    def child(self: SimulatedCompute, *given: Any, name: str, **more: Any) -> Any:
        started[name] = more.get("interpreter")
        return real(self, *given, name=name, **more)

    monkeypatch.setattr(SimulatedCompute, "child", child)
    tables = {
        role: {"interpreter": f"/{role}/python"} for role in ("inference", "validator", "trainer")
    }
    story = Story(Plan("inference-1", ["inference"]), tables=tables)
    story.run("validator.verdict", "validator")
    assert started == {
        "engine": "/inference/python",
        "inspector": "/validator/python",
        "prefill": "/validator/python",
        "trainer": "/trainer/python",
    }
