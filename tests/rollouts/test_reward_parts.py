"""The parts of rewards on their way from the grader to the reader."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.rollouts.rollouts import mean_parts, parts_in, parts_of
from swarm.wire.envelope import ENVELOPE_BYTES_MAX
from swarm.wire.messages import REWARD_VALUES_MAX, Check, RewardParts, Verdict

PARTS = st.dictionaries(st.text(max_size=4), st.floats(-10, 10, width=32), max_size=4)


@given(st.lists(st.tuples(PARTS, PARTS), min_size=1, max_size=5))
def test_what_goes_in_comes_out(groups: list[tuple[dict[str, float], ...]]) -> None:
    found = parts_of([each for group in groups for each in group])
    rewards = [[0.0, 1.0]] * len(groups)
    if len({name for group in groups for each in group for name in each}) <= 16:
        for index, group in enumerate(groups):
            assert parts_in(found, rewards, index) == list(group)
    assert parts_in(found, [*rewards, [0.0]], 0) == [{}, {}], "they do not fit the rewards"


def test_a_value_beyond_float32_is_left_out() -> None:
    assert parts_in(parts_of([{"a": 1e300, "b": 1.0}]), [[1.0]], 0) == [{"b": 1.0}]


def test_the_mean_is_over_those_that_have_a_part() -> None:
    assert mean_parts([{"a": 1.0}, {"a": 0.0, "b": 3.0}, {}]) == {"a": 0.5, "b": 3.0}


@pytest.mark.parametrize("groups", [512, 1024])
def test_the_largest_verdict_fits_an_envelope(groups: int) -> None:
    size = REWARD_VALUES_MAX // groups if groups == 1024 else 2
    parts = parts_of([{f"{n:03}" + "x" * 300: 0.1 for n in range(20)}] * (groups * size))
    assert len(parts.names) == (3 if groups == 512 else 0)
    verdict = Verdict(
        submission=bytes(32), size_bytes=1 << 40, worker="Q" * 52, lineage=1, step=1 << 20,
        policy=1 << 20, number=1 << 20, outcome="accepted", detail="x" * 500,
        checks=[Check(name="x" * 40, figure=0.1, threshold=0.1, passed=True)] * 20,
        rewards=[[0.1] * size] * groups, task_means=[0.1] * groups, task_spreads=[0.1] * groups,
        environments=[1] * groups, quarantined=list(range(groups)), parts=parts,
    )  # fmt: skip
    assert len(msgspec.msgpack.encode(verdict)) < ENVELOPE_BYTES_MAX - 1024


def test_verdicts_are_read_by_older_and_newer_peers() -> None:
    """Fields of an older verdict are missing; an older peer ignores those that it does not know."""
    raw = msgspec.msgpack.encode(
        Verdict(
            submission=bytes(32), size_bytes=1, worker="Q" * 46, lineage=0, step=0, policy=0,
            number=0, outcome="accepted", rewards=[[1.0, 0.0]], quarantined=[0],
        )
    )  # fmt: skip
    fields = msgspec.msgpack.decode(raw)
    known = fields[: -len(["quarantined", "parts", "continued", "seed"])]
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(known), type=Verdict)
    assert (older.quarantined, older.parts) == ([], RewardParts())
    assert not older.continues(0)
    newer = msgspec.msgpack.decode(msgspec.msgpack.encode([*fields, "unknown"]), type=Verdict)
    assert newer.quarantined == [0]
