"""Episodes: how an environment answers the model, and when an episode is over.

Worker and validator run the same functions. The environment's answer depends only on the tokens
before it, so a validator that replays an episode must get the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peers.environments.base import Environment, Renderer, Task, answer_of, grade, multi_turn
from swarm.rollouts.rollout import TURNS_MAX, Segment

ANSWER_CHARACTERS_MAX = 1 << 16
"""A longer answer fits no episode and ends it; rendering it would only cost time."""


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits that end an episode even if the environment would answer."""

    stop_ids: Sequence[int]
    max_new_tokens: int
    """Model tokens in the whole episode."""
    positions_max: int
    """The model's context length: all tokens of the episode, the prompt included."""


def environment_tokens(
    environment: Environment,
    task: Task,
    renderer: Renderer,
    segments: Sequence[Segment],
    limits: EpisodeLimits,
) -> list[int] | None:
    """The token ids of the environment's answer to the last of `segments`, a model segment.

    None means that the episode is over: the environment gives no answer or an empty one, the last
    segment ended at or used up the token limit, the episode has `TURNS_MAX` model segments, or the
    answer would leave fewer positions than the model may still sample. Raises `UserError` for an
    environment whose code fails.
    """
    if multi_turn(environment) is None or segments[-1].finish == "length":
        return None
    used = sum(len(segment.tokens) for segment in segments if segment.kind == "model")
    turns = sum(segment.kind == "model" for segment in segments)
    if used >= limits.max_new_tokens or turns >= TURNS_MAX:
        return None
    answer = answer_of(environment, task, turn_texts(renderer, segments, limits.stop_ids)[0])
    if answer is None or len(answer) > ANSWER_CHARACTERS_MAX:
        return None
    tokens = renderer.encode_completion(answer)
    length = sum(len(segment.tokens) for segment in segments) + len(tokens)
    fits = length + limits.max_new_tokens - used <= limits.positions_max
    return tokens if tokens and fits else None


def turn_texts(
    renderer: Renderer, segments: Sequence[Segment], stop_ids: Sequence[int]
) -> tuple[list[str], bool]:
    """(text of each segment after the prompt, whether the last ended with a stop token).

    The texts of model segments lack their stop token. Raises `ValueError` for an id outside every
    vocabulary.
    """
    texts, finished = [], False
    for segment in segments[1:]:
        cut_at = stop_ids if segment.kind == "model" else ()
        text, finished = renderer.decode_completion(segment.tokens, cut_at)
        texts.append(text)
    return texts, finished


def grade_segments(
    environment: Environment,
    task: Task,
    renderer: Renderer,
    segments: Sequence[Segment],
    stop_ids: Sequence[int],
) -> float:
    """The environment's reward for an episode; raises `UserError` as `grade` does."""
    return grade(environment, task, *turn_texts(renderer, segments, stop_ids))
