"""Episodes: how an environment answers the model, and when an episode is over.

Worker and validator run the same functions. The environment's answer depends only on the tokens
before it, so a validator that replays an episode must get the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from peers.environments.interface import Environment, Grade, Task, Transcript, Turn, episodes_of
from peers.environments.play import Episode, Observation, grade
from peers.environments.renderer import Renderer
from swarm.errors import UserError
from swarm.rollouts.rollout import Segment, Span
from swarm.rollouts.signed_turns import has_room

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


class Replies:
    """The environment's side of one episode, in token ids."""

    def __init__(
        self, environment: Environment, task: Task, renderer: Renderer, limits: EpisodeLimits
    ) -> None:
        self._episode = Episode(environment, task)
        self._several_turns = episodes_of(environment) is not None
        self._prompt, self._renderer, self._limits = task.prompt, renderer, limits

    def next(self, segments: Sequence[Segment]) -> list[int] | None:
        """The token ids of the environment's answer to the last of `segments`, a model segment.

        Must be called after each model segment, in order. None: the episode is over, because the
        environment gives no answer or an empty one, the last segment reached the token limit, there
        are `TURNS_MAX` model segments, or the answer would leave too few positions. Raises
        `UserError` for an environment whose code fails."""
        if not self._several_turns or segments[-1].finish == "length":
            return None
        limits = self._limits
        written = [segment.tokens for segment in segments if segment.kind == "model"]
        if not has_room(written, limits.max_new_tokens):
            return None
        text, _ = self._renderer.decode_completion(segments[-1].tokens, limits.stop_ids)
        answer = self._episode.step(text)
        if answer is None or _characters(answer) > ANSWER_CHARACTERS_MAX:
            return None
        tokens = self._renderer.encode_observation(self._prompt, answer, segments[-1].tokens[-1])
        length = sum(len(segment.tokens) for segment in segments) + len(tokens)
        left = limits.max_new_tokens - sum(map(len, written))
        return tokens if tokens and length + left <= limits.positions_max else None


def demonstrate(
    environment: Environment | None, task: Task, renderer: Renderer, stop_id: int
) -> list[Segment]:
    """The episode in which the model writes `task.model_turns`, each ended by `stop_id`; several
    need an `environment`. Raises `UserError` if its code fails or it answers too few of them."""
    limits = EpisodeLimits([stop_id], 1 << 30, 1 << 31)
    replies = Replies(environment, task, renderer, limits) if environment is not None else None
    segments = [Segment("prompt", renderer.encode_prompt(task.prompt))]
    turns = task.own.model_turns
    for index, text in enumerate(turns):
        written = [*renderer.encode_completion(text), stop_id]
        span = Span(policy=0, tokens=len(written))
        segments.append(Segment("model", written, "stop", spans=[span]))
        if index + 1 < len(turns):
            reply = replies.next(segments) if replies is not None else None
            if reply is None:
                raise UserError(
                    f"the environment does not answer the turn {text[:40]!r} of "
                    "its own demonstration; repair the task's demonstration or the environment"
                )
            segments.append(Segment("environment", reply))
    return segments


def _characters(observation: Observation) -> int:
    if isinstance(observation, str):
        return len(observation)
    return sum(len(message.content) for message in observation)


def transcript_of(
    renderer: Renderer, segments: Sequence[Segment], stop_ids: Sequence[int]
) -> Transcript:
    """The texts after the prompt, the model's without stop token; raises as `decode_completion`."""
    turns, finished = [], False
    for segment in segments[1:]:
        is_model = segment.kind == "model"
        text, finished = renderer.decode_completion(segment.tokens, stop_ids if is_model else ())
        turns.append(Turn("model" if is_model else "environment", text))
    return Transcript(tuple(turns), finished)


def grade_segments(
    environment: Environment,
    task: Task,
    renderer: Renderer,
    segments: Sequence[Segment],
    stop_ids: Sequence[int],
) -> Grade:
    """The environment's grade of an episode; raises `UserError` as `grade` does."""
    return grade(environment, task, transcript_of(renderer, segments, stop_ids))
