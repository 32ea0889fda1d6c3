"""The trainer's side of merging swarms: each answer is adopted once, whatever is killed when."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from simnet.simulation import Peer, Simulation
from swarm.wire.manifest import Adapter
from tests.trainer.test_role import publishes, simulate, start_run

STEPS = 12
EXCHANGE = "exchange"


async def answer(trainer: Peer, problem: str = "") -> None:
    """A replica: answer each snapshot a while after it appears, for ever."""
    await trainer.disk.write(f"{EXCHANGE}/replica", b"")
    answered: set[str] = set()
    while True:
        for name in trainer.disk.list(EXCHANGE):
            kind, _, number = name.partition("-")
            if kind == "snapshot" and number not in answered:
                answered.add(number)
                await trio.sleep(7.0)
                await trainer.disk.write(f"{EXCHANGE}/answer-{number}", problem.encode())
        await trio.sleep(1.0)


def run(main: Any, **settings: Any) -> list[tuple[str, Any]]:
    """What the trainer says in a run of `STEPS` steps, beside which `main` runs."""

    async def simulated(simulation: Simulation) -> None:
        peers = await start_run(
            simulation, "validator", "trainer", "inference-one", steps=STEPS, step_seconds=5.0,
            checkpoints_kept=9, trainer={"exchange": EXCHANGE},  **settings,
        )  # fmt: skip
        over = simulation.expect("trainer.run_complete", ["trainer"])
        async with trio.open_nursery() as nursery:
            await main(simulation, peers["trainer"], nursery)
            assert await simulation.meet(over, 1800), peers["trainer"].ended
            nursery.cancel_scope.cancel()

    return [(event.name, event.fields) for name, event in simulate(simulated) if name == "trainer"]


def merges(said: list[tuple[str, Any]]) -> list[tuple[int, int]]:
    """(number, step) of each adoption."""
    found = [fields for name, fields in said if name == "trainer.merged"]
    return [(fields["number"], fields["step"]) for fields in found]


async def undisturbed(simulation: Simulation, trainer: Peer, nursery: trio.Nursery) -> None:
    nursery.start_soon(answer, trainer)


def test_it_hands_out_a_snapshot_every_few_steps_and_adopts_each_answer() -> None:
    found = merges(run(undisturbed))
    assert [number for number, _ in found] == [1, 2, 3]
    assert all(step > 3 * number - 1 for number, step in found)  # steps count from 0


@pytest.mark.parametrize(
    ("save_steps", "after"),
    [
        (4, 2.0),
        *(
            pytest.param(every, after, marks=pytest.mark.slow)
            for every, after in [(1, 0.0), (4, 0.0), (1, 2.0), (1, 6.0), (4, 6.0), (4, 9.0)]
        ),
    ],
)
def test_killed_at_any_instant_it_adopts_each_answer_once(save_steps: int, after: float) -> None:
    """The simulated policy fails if an answer is added twice, and the run fails if a repeated step
    gives another policy than the published one."""

    async def killed(simulation: Simulation, trainer: Peer, nursery: trio.Nursery) -> None:
        nursery.start_soon(answer, trainer)
        for step in (3, 6, 7):
            assert await simulation.meet(publishes(simulation, step), 1800)
            await trio.sleep(after)
            await trainer.kill()
            await trainer.start(resume=True)

    said = run(killed, save_steps=save_steps)
    assert "trainer.rolled_back" not in [name for name, _ in said]
    steps = dict(merges(said))
    assert sorted(steps) == list(range(1, 1 + len(steps)))
    assert len(steps) >= 2


def test_without_a_replica_or_an_answer_it_goes_on_and_says_so() -> None:
    async def silent(simulation: Simulation, trainer: Peer, nursery: trio.Nursery) -> None:
        assert await simulation.meet(publishes(simulation, 4), 1800)
        await trainer.disk.write(f"{EXCHANGE}/replica", b"")

    said = run(silent)
    missing = [fields["number"] for name, fields in said if name == "trainer.merge_missing"]
    assert missing == [0, 1]
    assert merges(said) == []


def test_an_answer_that_cannot_be_adopted_is_left_out_and_the_next_one_is_awaited() -> None:
    async def refused(simulation: Simulation, trainer: Peer, nursery: trio.Nursery) -> None:
        nursery.start_soon(answer, trainer, "another tokenizer")

    said = run(refused)
    found = [fields for name, fields in said if name == "trainer.merge_refused"]
    assert [(each["number"], each["reason"]) for each in found] == [
        (number, "another tokenizer") for number in (1, 2, 3)
    ]


def test_adapters_are_not_merged() -> None:
    async def ends(simulation: Simulation) -> None:
        await start_run(
            simulation, "trainer", trainer={"exchange": EXCHANGE}, adapter=Adapter(rank=2)
        )
        await trio.sleep(30)

    with pytest.raises(AssertionError, match=r"trainer\.exchange is set, but the run trains"):
        simulate(ends)
