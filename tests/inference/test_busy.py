"""A busy device: generation goes on while submissions end, are delivered and judged."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

import pytest
import trio

from peers.inference.idle import CAUSES, DeviceMeter
from peers.inference.pending import UNDELIVERED_MAX, PendingSubmission, PendingSubmissions
from peers.inference.role import InferenceRole
from simnet.clock import run_virtual
from simnet.compute.children import SimulatedCompute
from simnet.compute.setting import Hardware, Workload
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event, Events
from swarm.node.status import IDLE_SECONDS, Status
from swarm.sentences import sentence
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import StepOrder
from tests.orders import step_order, submission_order
from tests.worlds import VirtualWorld

MINUTE = 60.0


class Worker:
    """What one worker says in a swarm that always wants more."""

    def __init__(
        self, hardware: Hardware, *, cut_at: float | None = None, hangs_at: float | None = None
    ) -> None:
        self.simulation = Simulation(3, workload=Workload(completion_tokens_mean=64))
        self.said: list[tuple[float, str, dict[str, Any]]] = []
        self.simulation.listeners.append(self._hear)
        self._hardware = hardware
        self._cut_at = cut_at
        """When the validator can no longer be reached."""
        self._hangs_at = hangs_at
        """When the engine stops in the midst of what it generates."""

    def _hear(self, now: float, peer: Peer, event: Event) -> None:
        if peer.name == "worker":
            self.said.append((now, event.name, event.fields))

    def named(self, name: str) -> list[tuple[float, dict[str, Any]]]:
        return [(now, fields) for now, each, fields in self.said if each == name]

    def work(self, seconds: float) -> None:
        async def main() -> None:
            async with self.simulation.running():
                await start_bootstrap(
                    self.simulation, trainers=["trainer"], validators=["validator"], steps=1000,
                    groups_per_step=32, max_new_tokens=128,
                )  # fmt: skip
                for plan in (
                    Plan("validator", ["validator"]),
                    Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=1.0)),
                    Plan("worker", ["inference"], hardware=self._hardware),
                ):
                    await self.simulation.add(plan).start()
                if self._hangs_at is not None:
                    await trio.sleep_until(self._hangs_at)
                    node = self.simulation.peers["worker"].node
                    assert node is not None and isinstance(node.compute, SimulatedCompute)
                    node.compute._setting.hardware = Hardware(tokens_per_second=1e-6)
                if self._cut_at is not None:
                    await trio.sleep_until(self._cut_at)
                    peers = self.simulation.peers
                    self.simulation.network.cut(peers["worker"].id, peers["validator"].id)
                await trio.sleep_until(seconds)

        run_virtual(main, seed=3, limit_seconds=seconds + 60)
        assert self.simulation.violations == []


def test_a_device_with_work_is_busy_though_proofs_and_deliveries_take_time() -> None:
    worker = Worker(Hardware(tokens_per_second=400.0, proof_tokens_per_second=600.0))
    worker.work(2.2 * MINUTE)
    reports = [fields for _, fields in worker.named("inference.device")]
    assert len(reports) == 2
    assert reports[-1]["busy"] > 0.9, reports[-1]
    made = [(each["step"], each["number"]) for _, each in worker.named("inference.submission_made")]
    assert made == sorted(made)
    delivered = worker.named("inference.submission_delivered")
    told = [(each["step"], each["number"]) for _, each in delivered]
    assert told == made[: len(told)], "in order"
    assert {each["outcome"] for _, each in worker.named("inference.receipt")} == {"accepted"}


def test_deliveries_that_stall_bound_what_is_generated() -> None:
    worker = Worker(Hardware(tokens_per_second=400.0), cut_at=0.5 * MINUTE)
    worker.work(2.2 * MINUTE)
    made = len(worker.named("inference.submission_made"))
    delivered = len(worker.named("inference.submission_delivered"))
    assert 1 <= made - delivered <= UNDELIVERED_MAX
    last = worker.named("inference.device")[-1][1]
    assert last["busy"] == 0.0
    assert last["waiting_for_delivery"] + last["out_of_work"] > 0.9, last
    rates = [fields["tokens_per_second"] for _, fields in worker.named("peer.status")]
    assert max(rates) > 100 and rates[-1] == 0.0, "others are not told the rate of long ago"


def test_one_more_may_begin_while_all_episodes_wait_for_environment_peers() -> None:
    pending, order, room = PendingSubmissions(), step_order(1), 9

    def begin() -> PendingSubmission:
        asked = submission_order(number=pending.number)
        begun = PendingSubmission(order=order, envelope=None, asked=asked, entry=b"", since=0.0)
        pending.begin(begun)
        return begun

    pending.start_step(order, 0)
    for _ in range(6):
        pending.end(begin(), order)  # as many as are expected for the next step
    pending.start_step(order, 0)
    for count in (2, 3):
        while pending.obstacle(order, room) is None:
            begin()
        assert len(pending.generating) == count
        assert not pending.stall(count - 1), "one of them waits for its prompts"
        assert not pending.stall(0), "some episodes are generated"
        assert pending.obstacle(order, room) == "building_proofs"
        assert pending.stall(count) and not pending.stall(count), "said once"
    begin()
    assert pending.obstacle(order, room) == "building_proofs"
    assert pending.stall(UNDELIVERED_MAX)
    assert pending.obstacle(order, room) == "building_proofs", "no more than these"


def test_an_engine_that_hangs_shows_no_rate_of_before() -> None:
    worker = Worker(Hardware(tokens_per_second=400.0), hangs_at=MINUTE)
    worker.work(4 * MINUTE)
    last = worker.named("inference.submission_made")[-1][0]
    assert last < 1.2 * MINUTE
    told = [(now, fields["tokens_per_second"]) for now, fields in worker.named("peer.status")]
    assert {rate > 100 for now, rate in told if 0.5 * MINUTE < now < last} == {True}
    assert {rate for now, rate in told if now > last + MINUTE} == {0.0}
    assert worker.named("peer.status")[-1][1]["doing"].startswith("generating")


def test_a_rate_lasts_while_its_generation_may() -> None:
    status = Status(tokens_per_second=100.0)
    status.begins(1000.0, 60.0)
    assert (status.rate(1179.0), status.rate(1181.0)) == (100.0, 0.0), "three times as long"
    status.begins(1181.0, 1.0)
    assert (status.rate(1181.0 + IDLE_SECONDS), status.rate(1212.0)) == (100.0, 0.0)
    status.idle_since = 1212.0
    assert (status.rate(1213.0), status.rate(1243.0)) == (100.0, 0.0)


async def test_the_time_of_a_device_is_divided_among_causes() -> None:
    heard: list[Event] = []
    events = Events(VirtualWorld(), "me")
    events.add_sink(heard.append)
    meter = DeviceMeter(events)
    await trio.sleep(2)
    meter.idles("waiting_for_order")
    await trio.sleep(3)
    meter.idles("loading_weights")
    await trio.sleep(1)
    with meter.generating():
        meter.idles("waiting_for_order")  # no cause counts while a submission is asked for
        await trio.sleep(10)
        with meter.generating():
            await trio.sleep(20)
    await trio.sleep(4)
    meter.report(27.0)
    with meter.generating():
        await trio.sleep(10)
    meter.report(37.0)
    first, second = (event.fields for event in heard)
    assert first["seconds"] == 40 and first["busy"] == pytest.approx(27 / 40)
    assert {cause: round(40 * first[cause], 6) for cause in CAUSES if first[cause]} == {
        "starting": 2, "waiting_for_order": 7, "loading_weights": 1, "building_proofs": 3,
    }  # fmt: skip
    assert sentence("inference.device", first) == (
        "device 68 % busy; idle: 18 % waiting for order, 8 % building proofs, "
        "5 % starting, 2 % loading weights"
    )
    assert second["busy"] == 1.0
    assert sentence("inference.device", second) == "device 100 % busy"


class Recorded(InferenceRole):
    """Notes the submissions that it begins while it has another one of the same step to deliver."""

    ahead: ClassVar[set[tuple[str, int, int]]] = set()
    """(name, step, number)."""

    def _begin_submission(self, order: StepOrder, manifest: RunManifest) -> PendingSubmission:
        undelivered = any(each.order.step == order.step for each in self._pending.begun)
        begun = super()._begin_submission(order, manifest)
        if undelivered:
            self.ahead.add((self._peer.peer_id, order.step, begun.number))
        return begun


def test_a_worker_begins_ahead_only_as_far_as_it_expects_to_deliver() -> None:
    """At most one more than it delivered in the step before; so workers that share a small step
    generate little that others deliver."""
    simulation = Simulation(3, workload=Workload(completion_tokens_mean=64))
    last: defaultdict[tuple[str, int], int] = defaultdict(lambda: -1)
    """The last number that a worker delivered in a step."""

    def hear(now: float, peer: Peer, event: Event) -> None:
        if event.name == "inference.submission_delivered":
            last[peer.id, event.fields["step"]] = event.fields["number"]

    simulation.listeners.append(hear)

    async def main() -> None:
        Recorded.ahead.clear()
        async with simulation.running():
            await start_bootstrap(
                simulation, trainers=["trainer"], validators=["validator"], steps=1000,
                groups_per_step=16, max_new_tokens=128,
            )  # fmt: skip
            slow = Hardware(tokens_per_second=400.0, proof_tokens_per_second=800.0)
            for plan in (
                Plan("validator", ["validator"]),
                Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=1.0)),
                *(
                    Plan(f"worker-{index}", ["inference"], hardware=slow, acts=Recorded)
                    for index in range(3)
                ),
            ):
                await simulation.add(plan).start()
            await trio.sleep_until(1.5 * MINUTE)

    run_virtual(main, seed=3, limit_seconds=2 * MINUTE)
    assert simulation.violations == []
    assert Recorded.ahead, "a worker that delivered some begins ahead"
    for worker, step, number in Recorded.ahead:
        assert number <= last[worker, step - 1] + 1, (step, number)
