"""Rollouts: which segments make an episode."""

from __future__ import annotations

import pytest

from swarm.rollouts.rollout import TURNS_MAX, Rollout, Segment, Span

PROMPT = Segment("prompt", [1, 2, 3])
ANSWER = Segment("environment", [7, 8])


def model(count: int, finish: str = "stop") -> Segment:
    values = [-1.0 - index for index in range(count)]
    return Segment("model", range(10, 10 + count), finish, values, (Span(4, count),))  # type: ignore[arg-type]


def test_positions_count_model_tokens_across_turns() -> None:
    rollout = Rollout([PROMPT, model(2), ANSWER, model(3, "length")])
    assert rollout.tokens == [1, 2, 3, 10, 11, 7, 8, 10, 11, 12]
    assert rollout.sampled == [3, 4, 7, 8, 9]
    assert rollout.model_tokens == [10, 11, 10, 11, 12]
    assert rollout.log_probabilities == [-1.0, -2.0, -1.0, -2.0, -3.0]
    assert rollout.prompt == [1, 2, 3]


def test_a_single_turn_is_a_prompt_and_a_model_segment() -> None:
    rollout = Rollout.single_turn([1, 2], [5, 6, 7], finish="length", policy=3)
    assert [segment.kind for segment in rollout.segments] == ["prompt", "model"]
    assert rollout.segments[1].spans == (Span(3, 3),)
    assert rollout.log_probabilities is None


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [PROMPT],
        [model(1)],
        [model(1), PROMPT],
        [PROMPT, ANSWER],
        [PROMPT, model(1), ANSWER],
        [PROMPT, model(1), model(1)],
        [PROMPT, ANSWER, model(1)],
        [PROMPT, PROMPT, model(1)],
        [PROMPT, model(1), ANSWER, ANSWER, model(1)],
        [PROMPT, *([model(1), ANSWER] * TURNS_MAX), model(1)],
    ],
)
def test_segments_out_of_order_make_no_rollout(segments: list[Segment]) -> None:
    with pytest.raises(ValueError, match="are not a prompt and 1 to 64 model segments"):
        Rollout(segments)


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([Segment("prompt", []), model(1)], "has no token"),
        ([PROMPT, model(0)], "has no token"),
        ([Segment("prompt", [1], "stop"), model(1)], "was not sampled"),
        ([PROMPT, model(1), Segment("environment", [1], spans=(Span(0, 1),)), model(1)], "was not"),
        ([PROMPT, Segment("model", [1], None, None, (Span(0, 1),))], "finishes with None"),
        ([PROMPT, Segment("model", [1], "stop", [1.0, 2.0], (Span(0, 1),))], "2 log-prob"),
        ([PROMPT, Segment("model", [1, 2], "stop", None, (Span(0, 1),))], "do not cover"),
        ([PROMPT, Segment("model", [1], "stop", None, (Span(0, 1), Span(1, 0)))], "do not cover"),
        ([PROMPT, model(1, "length"), ANSWER, model(1)], "token limit is not the last"),
    ],
)
def test_a_malformed_segment_is_named(segments: list[Segment], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rollout(segments)
