"""Environments with a temperature of their own: sampled, checked and told apart."""

from __future__ import annotations

import msgspec
import pytest

from tests.orders import reference, submission_order
from tests.validator.conftest import Stage

MIXED = [reference(), reference(temperature=0.3)]
"""The seed draws each group's environment by the weights alone, so the tasks are the same whatever
the temperatures."""
CLAIMED = [1.0, 0.3]
NUMBER = next(
    number
    for number in range(99)
    if set(submission_order(environments=MIXED, number=number).environments_of_groups()) == {0, 1}
)
"""A submission with groups of both."""


def test_each_group_is_sampled_and_judged_at_its_environments_temperature(stage: Stage) -> None:
    header, rollouts = stage.generate(environments=MIXED, number=NUMBER)
    assert header.temperature == CLAIMED
    assert [header.temperature_of(index) for index in (0, 1, 2)] == [*CLAIMED, None]
    assert set(rollouts.environment.tolist()) == {0, 1}
    assert stage.inspect(header, rollouts, environments=MIXED, number=NUMBER).failed == ""
    judged = stage.judge(environments=MIXED, number=NUMBER)
    assert judged.failed == "" and judged.sampling.mismatches == 0
    assert judged.sampling.tokens == len(rollouts.log_probabilities)
    other = stage.generate(environments=[reference(), reference()])
    assert other[0].temperature == 1.0, "one number where all have the same"


@pytest.mark.parametrize("sampled", [(1.0, 1.0), (0.3, 0.3), (0.3, 1.0)])
def test_another_environments_temperature_is_refused(
    stage: Stage, sampled: tuple[float, float]
) -> None:
    own = [reference(temperature=each) for each in sampled]
    header, rollouts = stage.generate(environments=own, number=NUMBER)
    honest = msgspec.structs.replace(header, temperature=CLAIMED)
    assert stage.inspect(header, rollouts, environments=MIXED, number=NUMBER).failed == "header"
    assert stage.inspect(honest, rollouts, environments=MIXED, number=NUMBER).failed == ""
    assert stage.judge(environments=MIXED, number=NUMBER).failed in ("sampling", "sampling_bound")
