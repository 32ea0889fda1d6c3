"""Values of states: advantages from them, which states are chosen, and a simulated run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.groups import Group, as_accepted
from peers.demo.recipes import OBJECTIVE, SAMPLING, SCHEDULE
from peers.learning.advantages import Completions, advantages
from peers.learning.values import give_turns, give_values, token_advantages
from peers.trainer.pool import Accepted
from peers.trainer.state_values import StateValues, boundaries
from swarm.jobs.training import StateValue
from swarm.node.states import States
from swarm.rollouts.rollout import Rollout, Segment, Span
from swarm.rollouts.rollouts import Rollouts
from swarm.wire.manifest import Objective, ProcessRewards, Values
from swarm.wire.messages import RewardParts
from tests.rollouts.harness import single_turns
from tests.trainer.runs import RUN, finish, simulated, start_run

RUNNER = RUN

REWARDS = st.floats(-10, 10, width=32)
OBJECTIVES = [
    Objective(),
    Objective(normalise_by_std=False),
    Objective(name="dr_grpo"),
    Objective(advantage="rloo"),
]


# --- advantages ------------------------------------------------------------------------------


@given(
    st.lists(REWARDS, min_size=2, max_size=5),
    st.integers(1, 12),
    st.dictionaries(st.integers(-1, 13), REWARDS, max_size=6),
    st.sampled_from(OBJECTIVES),
)
def test_a_token_has_the_difference_of_the_values_around_it(
    rewards: list[float], length: int, known: dict[int, float], objective: Objective
) -> None:
    values = [StateValue(0, position, value) for position, value in known.items()]
    found = token_advantages(values, length, rewards[0], rewards, objective)
    mean, scale = sum(rewards) / len(rewards), 1.0
    if objective.advantage == "rloo":
        scale = len(rewards) / (len(rewards) - 1)
    elif objective.normalise_by_std and objective.name != "dr_grpo":
        variance = sum((each - mean) ** 2 for each in rewards) / (len(rewards) - 1)
        scale = 1 / (variance**0.5 + 1e-6)
    levels = {0: mean, **{k: v for k, v in known.items() if 0 < k < length}, length: rewards[0]}
    expected = []
    for token in range(length):
        before = max(each for each in levels if each <= token)
        after = min(each for each in levels if each > token)
        expected.append((levels[after] - levels[before]) * scale)
    assert found.tolist() == pytest.approx(expected, rel=1e-2, abs=1e-3 * max(1.0, scale))


@given(st.lists(REWARDS, min_size=2, max_size=5), st.sampled_from(OBJECTIVES))
def test_without_values_every_token_has_its_groups_advantage(
    rewards: list[float], objective: Objective
) -> None:
    own = advantages(objective, Completions.of([rewards]))
    for row, reward in enumerate(rewards):
        found = token_advantages([], 3, reward, rewards, objective)
        assert found.tolist() == pytest.approx([float(own[row])] * 3, rel=1e-2, abs=1e-2)


def test_a_submission_takes_and_loses_values() -> None:
    rollouts = [Rollout.single_turn([1], [3, 4, 5, 2]) for _ in range(2)]
    (given,) = as_accepted([Group(rollouts, [1.0, 0.0], 0)])
    objective = replace(OBJECTIVE, normalise_by_std=False)
    give_values(given, [StateValue(1, 2, 0.75)], objective)
    assert given.token_advantage is not None
    assert given.token_advantage.tolist() == [0.5] * 4 + [0.25] * 2 + [-0.75] * 2
    give_values(given, [], objective)
    assert given.token_advantage is None


def test_a_turn_is_compared_with_the_same_turn_of_others() -> None:
    def rollout(*turns: int) -> Rollout:
        """Model segments of so many tokens."""
        segments = [Segment("prompt", [1])]
        for tokens in turns:
            segments += [
                Segment("model", [3] * tokens, "stop", spans=[Span(0, tokens)]),
                Segment("environment", [4, 5]),
            ]
        return Rollout(segments[:-1])

    rollouts = [rollout(2, 1, 3), rollout(1, 2), rollout(4), rollout(1, 1)]
    (given,) = as_accepted([Group(rollouts, [1.0, 0.5, 0.25, 0.25], 0)])
    nan = float("nan")
    earned = [[0.25, 0.5, 0.25, nan], [0.75, 0.0, nan, nan]]  # [turns][rollouts]
    given.parts = RewardParts(names=["turn_1", "turn_2"], values=np.array(earned, "<f4").tobytes())
    give_turns(given, replace(OBJECTIVE, normalise_by_std=False))
    assert given.token_advantage is not None
    to_go = 0.75 - 0.375  # of the second turn, which two rollouts had: 0.75 and 0
    expected = [[0.5] * 2 + [to_go] * 4, [0.0] + [-to_go] * 2, [-0.25] * 4, [-0.25] * 2]
    assert given.token_advantage.tolist() == [each for row in expected for each in row]
    give_turns(given, replace(OBJECTIVE, advantage="rloo"))
    assert given.token_advantage[0] == pytest.approx(0.5 * 4 / 3)
    own = "needs an objective of single tokens"
    for wrong in (
        Objective(credit="turns", name="gspo"),
        Objective(credit="turns", advantage="batch"),
    ):
        assert own in (wrong.problem(SCHEDULE) or "")
    assert "use one of the two" in (
        Values(estimate="continuations", segment_tokens=4).problem(
            SAMPLING, SCHEDULE, Objective(credit="turns")
        )
        or ""
    )


# --- choosing --------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 6),
    st.lists(st.integers(0, 3), max_size=2),
)
def test_states_lie_within_the_completion(
    tokens: list[int], segment: int, boundary_ids: list[int]
) -> None:
    found = boundaries(tokens, Values(segment_tokens=segment, boundary_ids=boundary_ids))
    assert all(0 < each < len(tokens) for each in found)
    for before, after in pairwise([0, *found]):
        ends = [
            each
            for each in range(before + segment, len(tokens))
            if not boundary_ids or tokens[each - 1] in boundary_ids
        ]
        assert after == ends[0]


@pytest.mark.parametrize(
    ("values", "schedule", "objective", "words"),
    [
        (Values(), replace(SCHEDULE, asynchrony=0), OBJECTIVE, ""),
        (Values(estimate="continuations", segment_tokens=2), SCHEDULE, OBJECTIVE, ""),
        (
            Values(estimate="continuations", segment_tokens=2),
            replace(SCHEDULE, asynchrony=0), OBJECTIVE, "schedule.asynchrony is 0",
        ),
        (
            Values(estimate="continuations", segment_tokens=8),
            SCHEDULE, OBJECTIVE, "values.segment_tokens is 8",
        ),
        (
            Values(estimate="continuations", segment_tokens=2),
            SCHEDULE, replace(OBJECTIVE, name="gspo"), "objective.name 'gspo' does not take them",
        ),
        (
            Values(estimate="continuations", segment_tokens=2),
            SCHEDULE, replace(OBJECTIVE, process=ProcessRewards(weight=1.0)),
            "with process rewards",
        ),
    ],
)  # fmt: skip
def test_settings_that_leave_no_use_for_continuations_are_refused(
    values: Values, schedule: Any, objective: Objective, words: str
) -> None:
    problem = values.problem(SAMPLING, schedule, objective)
    assert words in problem if problem else not words


# --- a run -----------------------------------------------------------------------------------


async def _read(_: StateValues, accepted: Accepted) -> Rollouts:
    """What a simulated file, which has no tokens, could hold."""
    groups = accepted.verdict.rewards
    places = [(g, s) for g, rewards in enumerate(groups) for s in range(len(rewards))]
    return single_turns(
        prompts=[[1]] * len(places),
        completions=[[3, 4, 5, 2]] * len(places),
        proofs=[b""] * len(places),
        group=[g for g, _ in places],
        sample=[s for _, s in places],
    )


VALUES = Values(estimate="continuations", segment_tokens=1, wait_seconds=300.0)


async def test_a_simulated_run_orders_and_uses_continuations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StateValues, "_read", _read)
    async with simulated() as (simulation, said):
        await start_run(
            simulation, "validator", "trainer", "inference-one", "inference-two",
            steps=4, step_seconds=5.0, values=VALUES,
        )  # fmt: skip
        await finish(simulation)
    trained = said.named("trainer.step_trained")
    assert len(trained) == 4
    # Until workers have a record, more is asked of them: the first batch may be full before, and
    # no step follows that could continue the last one's rollouts.
    assert sum(each.get("states_valued", 0) > 0 for each in trained) >= 2
    assert sum(each.get("left_out_continuation", 0) for each in trained) > 0
    assert {each["outcome"] for each in said.named("validator.verdict")} == {"accepted"}
    assert said.named("membership.peer_evicted") == []


async def test_a_trainer_that_returns_goes_on_with_its_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StateValues, "_read", _read)
    async with simulated() as (simulation, said):
        first = simulation.expect("trainer.step_trained", ["trainer"])
        peers = await start_run(
            simulation, "validator", "trainer", "inference-one", "inference-two",
            steps=6, step_seconds=5.0, save_steps=3, values=VALUES,
        )  # fmt: skip
        assert await simulation.meet(first, 600)
        await trio.sleep(1)
        await peers["trainer"].crash()
        await trio.sleep(2)
        await peers["trainer"].start(resume=True)
        await finish(simulation)
    trained = said.named("trainer.step_trained")
    assert [each["step"] for each in trained] == list(range(6))
    assert trained[1]["states_valued"] > 0  # the states were ordered before the crash
    assert said.named("trainer.rolled_back") == []
    assert {each["outcome"] for each in said.named("validator.verdict")} == {"accepted"}


async def test_states_that_nobody_serves_stop_the_work_and_blame_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StateValues, "_read", _read)

    async def nowhere(self: States, digest: bytes, size_bytes: int) -> None:
        pass

    monkeypatch.setattr(States, "_serve", nowhere)
    async with simulated() as (simulation, said):
        missing = simulation.expect("inference.states_missing", ["inference-one"])
        await start_run(simulation, "validator", "trainer", "inference-one", steps=4, values=VALUES)
        assert await simulation.meet(missing, 600)
        await trio.sleep(60)
    assert said.named("membership.peer_evicted") == []
    assert {each["outcome"] for each in said.named("validator.verdict")} == {"accepted"}
    sentences = {each["reason"] for each in said.named("inference.states_missing")}
    assert all("no peer sent the states of step 1" in each for each in sentences)
