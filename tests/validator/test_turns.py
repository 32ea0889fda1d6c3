"""Episodes of several turns: what a worker may not change about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from peers.engines.demo import LENGTH_MAX
from peers.environments import Episodes, Task, Tasks, Transcript
from peers.environments.sort_digits import SortDigits
from peers.validator.checks.file import CHECKS, REPLAYS
from swarm.rollouts.rollout import Rollout, Segment, Span
from swarm.rollouts.rollouts import Rollouts
from tests.orders import reference
from tests.validator.conftest import STOP_IDS, Stage
from tests.validator.test_inspector import Given


class Chat(Episodes):
    """Answers each of the first two turns with its length."""

    name = "chat"
    version = "1"

    def tasks(self) -> Tasks:
        return SortDigits().tasks()

    def start(self, task: Task) -> list[str]:
        return []

    def step(self, state: list[str], text: str) -> str | None:
        state.append(text)
        return f"{len(text)}>" if len(state) < 3 else None

    def grade(self, task: Task, transcript: Transcript) -> float:
        return len(transcript.turns) / 5


class Single(SortDigits):
    name = "chat"


class Broken(Chat):
    def step(self, state: list[str], text: str) -> str | None:
        raise RuntimeError("no tool")


@pytest.fixture
def made(stage: Stage) -> Any:
    """An honest submission of episodes with one to three turns, and what it takes to inspect it."""
    changes = {"environments": [reference("chat")], "max_new_tokens": 12}
    before = stage.engine._environments, stage.inspector._environments
    stage.engine._environments = stage.inspector._environments = Given(Chat())
    header, rollouts = stage.generate(**changes)
    yield header, rollouts, changes
    stage.engine._environments, stage.inspector._environments = before


def test_an_honest_episode_passes_and_its_proofs_and_tokens_fit(stage: Stage, made: Any) -> None:
    header, rollouts, changes = made
    turns = rollouts.segment_counts() // 2
    assert turns.max() == 3 and turns.min() < 3, "episodes of several lengths"
    found = stage.inspect(header, rollouts, **changes)
    assert (found.failed, len(found.checks)) == ("", len(CHECKS + REPLAYS))
    assert found.tokens == len(rollouts.log_probabilities) < len(rollouts.tokens)
    rewards = [reward for group in found.rewards for reward in group]
    assert rewards == [(2 * count - 1) / 5 for count in turns.tolist()]
    judged = stage.judge(**changes)
    assert (judged.failed, judged.proofs.chunks_passed) == ("", judged.proofs.chunks)
    assert judged.sampling.mismatches == 0
    assert judged.sampling.tokens == found.tokens


Change = Callable[[list[Segment]], None]


def with_segments(rollouts: Rollouts, wanted: int, change: Change) -> Rollouts:
    """Change the first rollout with that many segments that ended with a stop token."""
    rows = [rollouts.row(index) for index in range(len(rollouts))]
    index = next(
        index
        for index, row in enumerate(rows)
        if len(row.rollout.segments) == wanted and row.rollout.segments[-1].finish == "stop"
    )
    segments = list(rows[index].rollout.segments)
    change(segments)
    rows[index] = replace(rows[index], rollout=Rollout(tuple(segments)))
    return Rollouts.from_rows(rows)


def model(*tokens: int) -> Segment:
    finish: Any = "stop" if tokens[-1] in STOP_IDS else "length"
    return Segment("model", tokens, finish, [-1.0] * len(tokens), (Span(1, len(tokens)),))


def _another_answer(segments: list[Segment]) -> None:
    segments[2] = Segment("environment", [*segments[2].tokens, 5])


def _turn_left_out(segments: list[Segment]) -> None:
    del segments[2:4]


def _turn_invented(segments: list[Segment]) -> None:
    segments += [Segment("environment", [5, 14]), model(STOP_IDS[1])]


def _ended_early(segments: list[Segment]) -> None:
    del segments[2:]


@pytest.mark.parametrize("change", [_another_answer, _turn_left_out, _turn_invented, _ended_early])
def test_another_environments_turn_is_a_proven_fault(
    stage: Stage, made: Any, change: Change
) -> None:
    header, rollouts, changes = made
    forged = with_segments(rollouts, 6, change)
    found = stage.inspect(header, forged, **changes)
    assert (found.failed, found.proven_fault) == ("turns", True)
    assert "differs from the environment's answer" in found.detail


def test_a_finish_reason_that_lies_is_a_wrong_ending(stage: Stage, made: Any) -> None:
    header, rollouts, changes = made
    finishes = rollouts.segment_finishes.copy()
    last = rollouts.segment_offsets[1:] - 1
    finishes[last] = 3 - finishes[last]  # stop and length exchanged
    found = stage.inspect(header, replace(rollouts, segment_finishes=finishes), **changes)
    assert (found.failed, found.proven_fault) == ("ending", True)


def test_tokens_of_another_policy_are_a_proven_fault(stage: Stage, made: Any) -> None:
    header, rollouts, changes = made
    policies = rollouts.span_policies.copy()
    policies[3] = 0
    found = stage.inspect(header, replace(rollouts, span_policies=policies), **changes)
    assert (found.failed, found.proven_fault) == ("spans", True)


def test_an_environment_that_cannot_replay_leaves_the_tokens_to_tell_whose_fault_it_is(
    stage: Stage, made: Any
) -> None:
    """A worker that knows a text over which the environment fails gets no credit for it."""
    header, rollouts, changes = made
    stage.inspector._environments = Given(Broken())
    found = stage.inspect(header, rollouts, **changes)
    assert (found.failed, found.rewards, len(found.group_digests)) == ("", [], 4)
    assert "RuntimeError: no tool" in found.ungraded[0].reason
    assert stage.judge(**changes).failed == ""

    invented = with_segments(rollouts, 6, _first_turn_invented)
    found = stage.inspect(header, invented, **changes)
    assert found.failed == "" and "RuntimeError: no tool" in found.ungraded[0].reason
    assert stage.judge(**changes).failed != ""


def _first_turn_invented(segments: list[Segment]) -> None:
    tokens = list(segments[1].tokens)
    segments[1] = model(*(5 if token not in STOP_IDS else token for token in tokens))
    segments[-1] = model(*(5 for _ in segments[-1].tokens[1:]), STOP_IDS[0])


def _no_such_token(segments: list[Segment]) -> None:
    segments[2] = Segment("environment", [10_000])


def _beyond_the_context(segments: list[Segment]) -> None:
    segments[2] = Segment("environment", [5] * (LENGTH_MAX - 10))


@pytest.mark.parametrize("change", [_no_such_token, _beyond_the_context])
def test_turns_that_no_policy_can_read_are_a_proven_fault_though_none_can_be_replayed(
    stage: Stage, made: Any, change: Change
) -> None:
    header, rollouts, changes = made
    stage.inspector._environments = Given(Broken())
    found = stage.inspect(header, with_segments(rollouts, 6, change), **changes)
    assert (found.failed, found.proven_fault) == ("tokens", True)


def test_turns_in_a_run_of_single_turns_are_refused(stage: Stage, made: Any) -> None:
    header, rollouts, changes = made
    stage.inspector._environments = Given(Single())
    found = stage.inspect(header, rollouts, **changes)
    assert (found.failed, found.proven_fault) == ("schema", True)
    assert "environment tokens, at most 0 are allowed" in found.detail
