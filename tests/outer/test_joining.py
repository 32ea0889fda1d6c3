"""Trainers that join: at once or with the next round, and back from a branch of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware
from simnet.faults import Crash, Partition, befall
from simnet.lines import Line
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.scenarios.several_trainers import WORKLOAD, Agreement
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.ledger.entries import CheckpointPublished, decode
from swarm.sentences import sentence
from swarm.wire.manifest import Outer

STEP_SECONDS = 20.0
NAMES = ["a", "b", "c"]


class Told:
    """What three trainers say, and when."""

    def __init__(self, simulation: Simulation) -> None:
        self.events: list[tuple[float, str, Event]] = []
        simulation.listeners.append(self._hear)

    def _hear(self, now: float, peer: Peer, event: Event) -> None:
        self.events.append((now, peer.name, event))

    def named(self, name: str, peer: str) -> list[Event]:
        return [event for _, who, event in self.events if (event.name, who) == (name, peer)]

    def began(self, round: int) -> list[float]:
        """When each trainer began the inner steps of a round that it contributed to."""
        return [
            now - event.fields["seconds"]
            for now, _, event in self.events
            if event.name == "outer.contributed" and event.fields["round"] == round
        ]


def trained(
    outer: Outer,
    meanwhile: Callable[[Simulation], Awaitable[object]],
    *,
    late: str = "",
    line: Line = SERVER,
    stay: list[str] = NAMES,
) -> Told:
    """Run three trainers, of which `late` has a line of its own and starts later."""

    async def main() -> Told:
        simulation = Simulation(1, workload=WORKLOAD)
        Agreement(simulation)
        told = Told(simulation)
        async with simulation.running():
            await start_bootstrap(simulation, trainers=NAMES, validators=NAMES[:1], outer=outer)
            for name in NAMES:
                hardware = Hardware(step_seconds=STEP_SECONDS)
                place = line if name == late else SERVER
                peer = simulation.add(Plan(name, ["replica"], place, hardware))
                if name != late:
                    await peer.start()
            done = simulation.expect("outer.run_complete", stay)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(meanwhile, simulation)
                await simulation.meet(done, 900.0)
                nursery.cancel_scope.cancel()
        assert simulation.violations == []
        return told

    return run_virtual(main, seed=1, limit_seconds=2000.0)


def settings(**changes: Any) -> Outer:
    return Outer(**{"rounds": 5, "grace_seconds": 5.0, "deadline_seconds": 60.0, **changes})


def sentence_of(event: Event) -> str:
    return sentence(event.name, event.fields) or ""


async def start_late(simulation: Simulation) -> None:
    await trio.sleep(2.5 * STEP_SECONDS)
    await simulation.peers["c"].start()


def first_round(told: Told, peer: str) -> int:
    round: int = told.named("outer.contributed", peer)[0].fields["round"]
    return round


def test_a_newcomer_begins_a_round_together_with_the_others() -> None:
    told = trained(settings(join="blocking"), start_late, late="c")
    joins = told.named("outer.joining", "c")[0].fields["round"]
    round = first_round(told, "c")
    assert round == joins + 1, "the others were within that round when it came"
    merged = [each for each in told.named("outer.merged", "a") if each.fields["round"] == round]
    assert len(merged[0].fields["trainers"]) == 3, "its first contribution counts like the others'"
    began = told.began(round)
    assert len(began) == 3 and max(began) - min(began) < 2.0
    assert not told.named("outer.round_abandoned", "c")
    free = trained(settings(), start_late, late="c")
    assert first_round(free, "c") == joins, "at once, within the others' round"
    assert not free.named("outer.joining", "c")


def test_the_others_wait_for_a_newcomer_that_still_fetches_the_state() -> None:
    """A state of 8 MB at 0.2 MB/s takes 40 s: longer than the rest of the round."""
    slow = Line("us-east", 2e5, 2e5)
    outer = settings(join="blocking", join_seconds=300.0)
    told = trained(outer, start_late, late="c", line=slow)
    waits = told.named("outer.join_awaited", "a")
    assert waits and len(waits[0].fields["trainers"]) == 1
    assert "at most 300 s (outer.join_seconds)" in sentence_of(waits[0])
    began = told.began(waits[0].fields["round"])
    assert len(began) == 3 and max(began) - min(began) < 2.0
    assert not told.named("outer.join_missed", "a")


def test_the_wait_for_a_newcomer_ends() -> None:
    slow = Line("us-east", 1e4, 1e4)
    outer = settings(join="blocking", join_seconds=30.0)
    told = trained(outer, start_late, late="c", line=slow, stay=["a", "b"])
    missed = told.named("outer.join_missed", "a")
    assert missed and "begins without" in sentence_of(missed[0])
    awaited = told.named("outer.join_awaited", "a")
    assert {each.fields["round"] for each in missed} <= {each.fields["round"] for each in awaited}


def test_who_loses_power_joins_again_and_nobody_waits_for_ever() -> None:
    """Where all lose power, nobody is within a round: they begin at once."""
    both = [
        Crash(at=1.5 * STEP_SECONDS, seconds=5.0, peers=["c"]),
        Crash(at=4.5 * STEP_SECONDS, seconds=5.0, peers=NAMES),
    ]
    told = trained(settings(join="blocking"), lambda simulation: befall(simulation, both))
    assert len(told.named("outer.joining", "c")) >= 1
    assert all(len(told.named("outer.run_complete", name)) == 1 for name in NAMES)


def test_a_trainer_back_from_a_branch_of_its_own_says_so_and_goes_on_with_the_others() -> None:
    logged: list[CheckpointPublished] = []

    async def part_and_meet(simulation: Simulation) -> None:
        apart = Partition(at=2.5 * STEP_SECONDS, seconds=5 * STEP_SECONDS, peers=["c"])
        await befall(simulation, [apart])
        part = simulation.peers["c"].part
        assert part is not None
        log = part.trusted_part("replica").log_of(part.peer_id)
        assert log is not None
        while not any(entry.round and entry.round.rounds_lost for entry in logged):
            await trio.sleep(5.0)
            found = [decode(raw) for raw in log.entries(0, log.size())]
            logged[:] = [each for each in found if isinstance(each, CheckpointPublished)]
        await trio.sleep_forever()

    told = trained(settings(rounds=12), part_and_meet)
    (lost,) = told.named("outer.branch_lost", "c")
    words = sentence_of(lost)
    assert "their branch counts" in words and "goes on from the others' state" in words
    (left,) = told.named("outer.branch_left", "c")
    back = left.fields["round"]
    assert any(each.fields["round"] > back for each in told.named("outer.contributed", "c"))
    c = told.named("outer.run_complete", "c")[0].fields["state"]
    assert c == told.named("outer.run_complete", "a")[0].fields["state"]
    together = told.named("outer.merged", "a")[-1]
    assert len(together.fields["trainers"]) == 3, "what it contributes counts again"
    (entry,) = [each for each in logged if each.round and each.round.rounds_lost]
    assert entry.round is not None
    assert entry.round.rounds_lost == len(lost.fields["rounds"])
    assert entry.round.tokens_lost == lost.fields["tokens"]
