"""A worker that restarts goes on with its numbers, and one that leaves finishes its submission."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio

from peers.inference.pending import ASKED_AT_ONCE
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.world.observable import Observable

RUNNER = partial(run_virtual, seed=3)

SLOW = Hardware(tokens_per_second=200.0)


class Watched:
    """A swarm with one worker, whose events are kept."""

    def __init__(self, prefill_tokens_per_second: float = 40_000.0) -> None:
        self.simulation = Simulation(3, workload=Workload(completion_tokens_mean=16))
        self.events: list[tuple[float, str, dict[str, Any]]] = []
        self.changed: Observable[None] = Observable(None)
        self.simulation.listeners.append(self._hear)
        self._prefill = prefill_tokens_per_second

    def _hear(self, now: float, peer: Peer, event: Event) -> None:
        if peer.name == "worker":
            self.events.append((now, event.name, event.fields))
            self.changed.touch()

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for _, each, fields in self.events if each == name]

    async def start(self, **tables: dict[str, Any]) -> Peer:
        await start_bootstrap(
            self.simulation, trainers=["trainer"], validators=["validator"], steps=1000,
            groups_per_step=64, max_new_tokens=32,
        )  # fmt: skip
        judge = Hardware(prefill_tokens_per_second=self._prefill)
        for plan in (
            Plan("validator", ["validator"], hardware=judge),
            Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=1.0)),
            Plan("worker", ["inference"], hardware=SLOW, tables=tables),
        ):
            await self.simulation.add(plan).start()
        return self.simulation.peers["worker"]

    async def until(self, name: str, count: int) -> None:
        with trio.fail_after(3000):
            await self.changed.wait_until(lambda _: len(self.named(name)) >= count)


async def gone(peer: Peer, seconds: int) -> None:
    """Wait until a peer has left."""
    for _ in range(10 * seconds):
        if peer.node is None:
            return
        await trio.sleep(0.1)
    raise AssertionError("it is still at work")


@pytest.mark.parametrize("slow_judge", [False, True])
async def test_no_number_is_generated_twice(slow_judge: bool) -> None:
    watched = Watched(20.0 if slow_judge else 40_000.0)

    async with watched.simulation.running():
        worker = await watched.start()
        for restarts in (1, 2, 3):
            await watched.until("inference.submission_made", 4 * restarts)
            await worker.kill()
            await trio.sleep(2)
            await worker.start()
        await watched.until("inference.submission_made", 16)
        await watched.until("inference.receipt", 8)
    assert watched.simulation.violations == []
    made = [(each["step"], each["number"]) for each in watched.named("inference.submission_made")]
    assert len(made) == len(set(made))
    receipts = watched.named("inference.receipt")
    assert {each["outcome"] for each in receipts} == {"accepted"}
    resumed = watched.named("inference.resumed")
    assert resumed
    if slow_judge:
        assert any(each["submissions"] for each in resumed)


async def test_a_worker_that_is_asked_to_leave_hands_in_its_submissions() -> None:
    watched = Watched()

    async with watched.simulation.running():
        worker = await watched.start()
        await watched.until("inference.submission_made", 3)
        part = worker.part
        assert part is not None and worker.node is not None
        with trio.fail_after(600):
            while not part.status.doing.startswith("generating"):
                await part.status.changed.wait_change()
        before = len(watched.named("inference.submission_made"))
        assert worker.node.departure.ask()
        assert not worker.node.departure.ask(), "asked again, it abandons its work"
        await gone(worker, 60)
        made = len(watched.named("inference.submission_made"))
        assert before < made <= before + ASKED_AT_ONCE
        assert len(watched.named("inference.submission_delivered")) == made
    (leaving,) = watched.named("inference.leaving")
    assert leaving["seconds"] == 20.0


async def test_a_worker_without_patience_leaves_at_once() -> None:
    watched = Watched()

    async with watched.simulation.running():
        worker = await watched.start(inference={"leave_seconds": 0.0})
        await watched.until("inference.submission_made", 2)
        assert worker.node is not None
        worker.node.departure.ask()
        await gone(worker, 5)
    (leaving,) = watched.named("inference.leaving")
    assert leaving["seconds"] == 0
