"""States that groups continue: which ones, and as what they are graded."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.rollouts.continuations import (
    STATES_BYTES_MAX,
    BadStates,
    State,
    continued_groups,
    decode_states,
    encode_states,
    states_of_groups,
    whole,
)
from swarm.rollouts.rollout import Rollout

NONCE = bytes(range(32))


def state(*prefix: int, row: int = 0, submission: int = 1, environment: int = 0) -> State:
    return State(
        submission=bytes([submission]) * 32, row=row, group=row // 4, seed=bytes(32), step=1,
        environment=environment, prefix=list(prefix or (5,)),
    )  # fmt: skip


@given(
    st.floats(0.01, 0.9), st.integers(1, 50), st.integers(1, 8), st.integers(1, 40), st.text("ab")
)
def test_the_share_is_kept_and_no_state_repeated(
    share: float, states: int, size: int, submissions: int, worker: str
) -> None:
    """Whatever its groups per submission, a worker has ⌊k · share⌋ continuations among k groups."""
    made = [
        index
        for number in range(submissions)
        for index in states_of_groups(NONCE, worker, number * size, size, share, states)
    ]
    for count in range(len(made) + 1):
        assert sum(each is not None for each in made[:count]) == int(count * share)
    drawn = [each for each in made if each is not None]
    assert all(0 <= each < states for each in drawn)
    for first in range(0, len(drawn), states):
        turn = drawn[first : first + states]
        assert len(set(turn)) == len(turn)


def test_workers_begin_at_different_states() -> None:
    firsts = {states_of_groups(NONCE, str(worker), 1, 1, 0.5, 1000)[0] for worker in range(20)}
    assert len(firsts) > 15


def test_groups_and_blobs() -> None:
    states = [state(1), state(2, 3)]
    assert decode_states(encode_states(states), 2) == states
    found = continued_groups(states, 0.5, NONCE, "w", 3, 4)
    assert [each.group for each in found] == [1, 3]
    assert [each.state for each in found] == [states[each.index] for each in found]
    assert continued_groups([], 0.5, NONCE, "w", 3, 4) == []


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no states"),
        (msgspec.msgpack.encode([]), "no states"),
        (encode_states([state(1)])[:-1], "no states"),
        (encode_states([state(1)] * 4097), "no states"),
        (encode_states([state(-1)]), "no states"),
        (encode_states([state(2**31)]), "no states"),
        (encode_states([state(1, environment=16)]), "no states"),
        (encode_states([state(*range(8))]), "8 tokens; the longest may have 7"),
        (bytes(STATES_BYTES_MAX + 1), "bytes of states are more"),
    ],
)
def test_a_blob_that_breaks_a_bound_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(BadStates, match=words):
        decode_states(raw, 7)


def test_the_whole_rollout_is_graded() -> None:
    continued = Rollout.single_turn([1, 2, 3, 4], [5, 6], policy=3)
    joined = whole(continued, 2)
    assert [each.tokens for each in joined.segments] == [[1, 2], [3, 4, 5, 6]]
    assert joined.tokens == continued.tokens and joined.segments[1].finish == "stop"
    assert whole(continued, 0) is continued
