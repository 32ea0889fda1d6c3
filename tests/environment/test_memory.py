"""The states of episodes in an environment peer's child: bounded, and never worth a failed turn."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, cast

import msgspec
import trio
from hypothesis import given
from hypothesis import strategies as st

from peers.engines import demo
from peers.environment.memory import States
from peers.environment.service import EnvironmentPeerService
from peers.environments import Episodes, Generated, Task
from swarm.jobs.environment import DrawPrompt, EnvironmentSetup, PlayTurn
from tests.orders import reference, submission_order
from tests.validator.test_inspector import Given

STOP = 2


class State:
    def __init__(self) -> None:
        self.turns = 0


class Hungry(Episodes):
    """Holds so much in each state that there is memory for three."""

    name, version = "hungry", "1"

    def __init__(self) -> None:
        super().__init__()
        self.live: weakref.WeakSet[State] = weakref.WeakSet()

    def tasks(self) -> Any:
        return Generated(lambda _: Task(prompt="1>", answer=""))

    def start(self, task: Task) -> State:
        return State()

    def step(self, state: State, text: str) -> str:
        self.live.add(state)
        if len(self.live) > 3:
            raise MemoryError
        state.turns += 1
        return f"{state.turns}>"

    def grade(self, task: Task, transcript: Any) -> float:
        return 0.0


def test_states_that_fill_the_memory_make_way_and_episodes_are_played_again(tmp_path: Path) -> None:
    demo.make_policy(tmp_path, seed=1)
    service = EnvironmentPeerService(EnvironmentSetup(environments=[], folder=str(tmp_path)))
    service._environments = Given(Hungry())
    order = submission_order(stop_ids=[STOP], environments=[reference("hungry")])
    prompt = trio.run(service.draw, DrawPrompt(order=order, group=0)).tokens

    def play(worker: str, segments: list[list[int]]) -> list[int]:
        own = msgspec.structs.replace(order, worker=worker)
        job = PlayTurn(order=own, group=0, sample=0, segments=segments)
        played = trio.run(service.play, job)
        assert not played.differs
        return played.tokens

    first = {worker: play(worker, [prompt, [5, STOP]]) for worker in "abcdefgh"}
    assert all(first.values()) and len(service._going) <= 3
    for worker in "abcdefgh":
        assert play(worker, [prompt, [5, STOP], first[worker], [6, STOP]]) not in ([], prompt)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30))), st.integers(1, 8))
def test_the_worker_with_the_most_states_loses_its_oldest(
    kept: list[tuple[str, int]], most: int
) -> None:
    states = States(most)
    for worker, number in [("honest", -1), *kept]:
        states.keep(worker, (b"", number, 0, b""), cast(Any, number))
        assert len(states) <= most
    others = len({worker for worker, _ in kept})
    if others < most:
        mine: Any = states.pop("honest", (b"", -1, 0, b""))
        assert mine == -1, "strangers displace themselves"
    assert states.pop("honest", (b"", -1, 0, b"")) is None
