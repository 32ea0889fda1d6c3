"""Submissions with groups that continue states, made by a worker and judged by a validator."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from swarm.jobs import SubmissionOrder
from swarm.rollouts.continuations import Continued, State
from swarm.rollouts.rollouts import Rollouts
from tests.validator.conftest import Stage
from tests.validator.test_inspector import changed

STOPS = [2]


def continued(stage: Stage) -> tuple[list[Continued], SubmissionOrder, Rollouts]:
    """Two groups that continue rows of an earlier submission, whose content is given, too."""
    before = stage.order(number=7, stop_ids=STOPS)
    _, rollouts = stage.generate(number=7, stop_ids=STOPS)
    states = [
        State(
            submission=bytes(32), row=row, group=row // 4, seed=before.seed(), step=before.step,
            environment=0, prefix=rollouts.rollout(row).model_tokens[:length],
        )
        for row, length in ((1, 3), (9, 5))
    ]  # fmt: skip
    return [Continued(1, 0, states[0]), Continued(2, 1, states[1])], before, rollouts


@pytest.fixture(scope="module")
def given(stage: Stage) -> tuple[list[Continued], SubmissionOrder, Rollouts]:
    return continued(stage)


def test_an_honest_one_passes_all_checks(stage: Stage, given: Any) -> None:
    states, _, earlier = given
    header, rollouts = stage.generate(continued=states, stop_ids=STOPS)
    for group, row, length in ((1, 1, 3), (2, 9, 5)):
        for sample in range(4):
            whole = earlier.rollout(row).tokens
            prompt = len(earlier.prompt(row)) + length
            assert rollouts.prompt(4 * group + sample) == whole[:prompt]
            assert 1 <= len(rollouts.rollout(4 * group + sample).model_tokens) <= 8 - length
    found = stage.inspect(header, rollouts, continued=states, stop_ids=STOPS)
    assert found.failed == "" and len(found.rewards) == 4
    judged = stage.judge(continued=states, stop_ids=STOPS)
    assert judged.failed == "" and judged.sampling.mismatches == 0


def test_the_answer_is_graded_with_the_prefix(stage: Stage, given: Any) -> None:
    _, before, earlier = given
    digits = sorted(earlier.prompt(1)[1:7])
    state = State(
        submission=bytes(32), row=1, group=0, seed=before.seed(), step=before.step,
        environment=0, prefix=digits[:4],
    )  # fmt: skip
    states = [Continued(0, 0, state)]
    header, rollouts = stage.generate(continued=states, stop_ids=STOPS)

    def answer(lists: dict[str, Any]) -> None:
        lists["completions"][2] = [*digits[4:], 2]
        lists["completions"][3] = [*digits[4:], 7, 7]  # did not stop in time

    found = stage.inspect(
        header, changed(rollouts, answer, STOPS), continued=states, stop_ids=STOPS
    )
    assert found.failed == ""
    assert found.rewards[0] == [0.0, 0.0, 1.0, 0.0]


def test_another_prefix_is_a_proven_fault(stage: Stage, given: Any) -> None:
    states, _, _ = given
    header, rollouts = stage.generate(continued=states, stop_ids=STOPS)
    other = replace(states[0].state, prefix=[*states[0].state.prefix[:-1], 9])
    for expected in ([Continued(1, 0, other), states[1]], [states[1]], []):
        found = stage.inspect(header, rollouts, continued=expected, stop_ids=STOPS)
        # One that is too long for any expected prompt is refused as it is read.
        assert found.failed in ("prompts", "schema") and found.proven_fault
    plain_header, plain = stage.generate(stop_ids=STOPS)
    found = stage.inspect(plain_header, plain, continued=states, stop_ids=STOPS)
    assert found.failed == "prompts" and found.proven_fault


def test_a_continuation_ends_at_the_rollouts_own_limit(stage: Stage, given: Any) -> None:
    """A longer or a shorter one without a stop token is refused."""
    states, _, _ = given
    header, rollouts = stage.generate(continued=states, stop_ids=STOPS)
    for tokens in ([7] * 8, [7] * 6, [7] * 4):  # 8 − 3 are left

        def cut(lists: dict[str, Any], tokens: list[int] = tokens) -> None:
            lists["completions"][4] = tokens

        found = stage.inspect(
            header, changed(rollouts, cut, STOPS), continued=states, stop_ids=STOPS
        )
        assert found.failed == "ending"
