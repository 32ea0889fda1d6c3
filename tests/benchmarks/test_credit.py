"""Credit for single tokens: the task of many steps, and values from continuations."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.credit import LENGTH, SAMPLED, Judge, Sums
from benchmarks.groups import Group, as_accepted
from benchmarks.recipe import Sampler
from peers.engines.demo import EOS_ID, make_policy
from peers.environments import Renderer, Transcript, task_of
from peers.environments.episodes import demonstrate
from swarm.rollouts.rollout import Rollout
from swarm.rollouts.seeds import task_seed

DRAWN = bytes(32)


def test_a_mistake_runs_through_to_the_last_sum() -> None:
    environment, task = Sums(), task_of(Sums(), task_seed(DRAWN, 0))
    assert len(task.answer) + 1 == LENGTH
    assert environment.grade(task, Transcript.of(task.answer)) == 1
    assert environment.grade(task, Transcript.of(task.answer[:-2] + "x;")) == 0
    assert environment.grade(task, Transcript.of(task.answer, finished=False)) == 0
    sums = [int(step[3:]) for step in task.answer.split(";")[:-1]]
    digits = [int(step[1]) for step in task.answer.split(";")[:-1]]
    assert sums == [sum(digits[: count + 1]) % 100 for count in range(len(digits))]


def test_states_after_every_fourth_step_are_continued(tmp_path: Path) -> None:
    make_policy(tmp_path, positions=2 * LENGTH)
    renderer = Renderer(tmp_path)
    task = task_of(Sums(), task_seed(DRAWN, 0))
    rollout = Rollout(tuple(demonstrate(Sums(), task, renderer, EOS_ID)))
    size = SAMPLED.group_size
    rewards = [1.0] + [0.0] * (size - 1)  # as if the others were wrong
    accepted = as_accepted([Group([rollout] * size, rewards, 0)])
    judge = Judge(Sampler(tmp_path, [Sums()], SAMPLED), renderer, 2)
    judge(DRAWN, [Group([rollout] * size, rewards, 0)], accepted)
    found = accepted[0].token_advantage
    assert found is not None
    # Random weights earn nothing from there, except that they may end a whole answer.
    scale = size / (size - 1)
    assert found[:24].tolist() == pytest.approx([-scale / size] * 24)
    assert found[24:72].tolist() == [0.0] * 48
    assert found[72].item() + found[LENGTH - 1].item() == pytest.approx(scale)
    assert size * LENGTH < judge.tokens[0] <= size * LENGTH + 2 * size * (73 + 49 + 25 + 1)
