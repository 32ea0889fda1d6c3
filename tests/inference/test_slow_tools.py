"""A tool that takes long: its episode gives up the slot, and the others are generated meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from peers.engines.episodes import Player, Playing, ServedTask, finish
from peers.engines.native import NativeEngine
from peers.environments import Episodes, Renderer, Task, Tasks
from peers.environments.interface import SingleTurn
from peers.environments.sort_digits import SortDigits
from swarm.jobs.inference import TurnFailed
from swarm.wire.manifest import Sampling
from tests.orders import submission_order

torch.set_num_threads(1)

SAMPLING = submission_order(max_new_tokens=32, stop_ids=list(range(2, 18))).sampling
TASK = Task("42>", "24")
SECONDS = 60.0
"""Longest wait for what comes at once, unless the engine waits for the tool."""


@dataclass
class Tool(Episodes):
    """Answers a turn once the test lets it, in the order in which it was asked."""

    gate: Event = field(default_factory=Event)
    asked: Event = field(default_factory=Event)
    fails: bool = False
    calls: int = 0
    name, version = "tool", "1"

    def __post_init__(self) -> None:
        super().__init__()

    def tasks(self) -> Tasks:
        return SortDigits().tasks()

    def start(self, task: Task) -> list[str]:
        return []

    def step(self, state: list[str], text: str) -> str | None:
        self.asked.set()
        assert self.gate.wait(SECONDS)
        if self.fails:
            raise OSError("the tool's server is gone")
        self.calls += 1
        state.append(text)
        return "1>" if len(state) < 3 else None

    def grade(self, task: Task, transcript: Any) -> float:
        return 1.0


@pytest.fixture
def player(policy: Path) -> Iterator[Player]:
    player = Player(NativeEngine(policy, slots=4), sets_at_once=1)
    yield player
    assert player.is_idle and not player._engine._rows.live  # type: ignore[attr-defined]
    assert not player._engine._rows._kept, "no cache is left"  # type: ignore[attr-defined]


def playing(
    player: Player, policy: Path, environment: SingleTurn, rows: int = 1, sampling: Any = SAMPLING
) -> Playing:
    work = [(environment, TASK)] * rows
    made = Playing(Renderer(policy), work, range(rows), (1, 2), sampling)
    player.add(made)
    return made


def test_others_are_generated_while_a_tool_runs(player: Player, policy: Path) -> None:
    """Also those of a set that would have had to wait for this one's end."""
    tool = Tool()
    slow = playing(player, policy, tool, rows=2)
    while not tool.asked.is_set():
        player.step()
    other = playing(player, policy, SortDigits(), rows=4)
    finish(player, other)
    assert (slow.left, tool.calls) == (2, 0), "the tool has not answered yet"
    tool.gate.set()
    finish(player, slow)
    quick = Tool()
    quick.gate.set()
    alone = playing(player, policy, quick, rows=2)
    finish(player, alone)
    assert [each.tokens for each in slow.episodes().rollouts] == [
        each.tokens for each in alone.episodes().rollouts
    ], "the same tokens, however long the tool took"
    assert tool.calls == quick.calls > 2, "each turn is asked for once"
    cut = [each.finish for row in slow.played for each in row.segments if each.kind == "model"]
    assert set(cut) == {"stop"}


def test_calls_that_wait_do_not_overtake_a_submission_that_draws_its_tasks(
    player: Player, policy: Path
) -> None:
    tool, drawn = Tool(), []
    slow = playing(player, policy, tool, rows=4)
    while len(slow.asked) < 4:
        player.step()

    def draw() -> None:
        with player.environments_turn():
            drawn.append(tool.calls)

    thread = Thread(target=draw, daemon=True)
    thread.start()
    while not player._answering._next.locked():
        assert thread.is_alive()
    tool.gate.set()
    thread.join(SECONDS)
    assert drawn == [1]
    finish(player, slow)


def test_a_tool_that_fails_ends_its_own_set(player: Player, policy: Path) -> None:
    tool = Tool(fails=True)
    failing = playing(player, policy, tool, rows=3)
    while not tool.asked.is_set():
        player.step()
    other = playing(player, policy, SortDigits(), rows=2)
    tool.gate.set()
    with pytest.raises(TurnFailed, match=r"'tool' cannot answer .* server is gone"):
        finish(player, failing)
    finish(player, other)
    assert other.left == 0 and other.error is None


def test_a_set_that_is_given_up_while_its_tool_runs_is_not_answered(
    player: Player, policy: Path
) -> None:
    tool = Tool()
    given_up = playing(player, policy, tool, rows=2)
    while not tool.asked.is_set():
        player.step()
    player.remove(given_up)
    given_up.error = RuntimeError("nobody wants it")
    tool.gate.set()
    finish(player, playing(player, policy, SortDigits()))
    assert given_up.left == 2


def test_a_late_answer_counts_once(player: Player, policy: Path) -> None:
    """A peer that answers twice, or after the end, changes nothing."""
    asked: list[int] = []
    sampling: Sampling = SAMPLING
    work = ServedTask([5, 6, 7], False, lambda row, segments: asked.append(len(segments)))
    served = Playing(Renderer(policy), [work], [0], (1, 2), sampling)
    player.add(served)
    while not asked:
        player.step()
    for tokens in ([8, 9], [10, 11, 12], []):
        player.answer(served, 0, tokens)
    while len(asked) < 2:
        player.step()
    assert asked == [2, 4]
    player.answer(served, 0, [])
    player.answer(served, 0, [8, 9])
    finish(player, served)
    (rollout,) = served.episodes().rollouts
    answers = [list(each.tokens) for each in rollout.segments if each.kind == "environment"]
    assert answers == [[8, 9]]
