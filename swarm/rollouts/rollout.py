"""A rollout: one episode, as a list of segments of token ids.

A single-turn rollout is one prompt and one model segment. In an episode of several turns the
environment answers each model segment except the last. The *position* of a sampled token is its
index among the rollout's model tokens; noise, proofs and loss masks use this index. Masks,
advantages and rewards are not stored in a rollout but computed from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TURNS_MAX = 64
"""Most model segments in a rollout. Each turn after the first costs the worker a prefill."""

Kind = Literal["prompt", "model", "environment"]

Finish = Literal["stop", "length"]
"""How a model segment ends: with a stop token, or because the rollout reached its token limit."""


@dataclass(frozen=True)
class Span:
    """Successive model tokens sampled from one policy."""

    policy: int
    tokens: int


@dataclass(frozen=True)
class Segment:
    """Successive tokens with one origin. Only a model segment has the optional fields."""

    kind: Kind
    tokens: Sequence[int]
    """Token ids, at least one; includes the stop token, if any."""
    finish: Finish | None = None
    log_probabilities: Sequence[float] | None = None
    """One per token, as reported by the worker's engine; never used for training."""
    spans: Sequence[Span] = ()
    """The policies that the tokens were sampled from, in order."""


@dataclass(frozen=True)
class Rollout:
    """One episode."""

    segments: Sequence[Segment]

    def __post_init__(self) -> None:
        """Raise `ValueError` unless the segments form an episode."""
        kinds = [segment.kind for segment in self.segments]
        turns = len(kinds) // 2
        expected = ["prompt", *(["model", "environment"] * turns)[:-1]]
        if not 1 <= turns <= TURNS_MAX or kinds != expected:
            raise ValueError(
                f"segments {kinds[:6]} are not a prompt and 1 to {TURNS_MAX} model segments with "
                "environment segments between them"
            )
        for segment in self.segments:
            _check_segment(segment)
        if any(segment.finish == "length" for segment in self.segments[:-1]):
            raise ValueError("a model segment at the token limit is not the last")

    @classmethod
    def single_turn(
        cls,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        finish: Finish = "stop",
        policy: int = 0,
        log_probabilities: Sequence[float] | None = None,
    ) -> "Rollout":
        """Make a rollout of one prompt and one model segment, sampled from one policy."""
        model = Segment(
            "model", completion, finish, log_probabilities, (Span(policy, len(completion)),)
        )
        return cls((Segment("prompt", prompt), model))

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the first segment."""
        return self.segments[0].tokens

    @property
    def model_segments(self) -> list[Segment]:
        """The sampled segments, in order."""
        return [segment for segment in self.segments if segment.kind == "model"]

    @property
    def tokens(self) -> list[int]:
        """Token ids of all segments, concatenated."""
        return [token for segment in self.segments for token in segment.tokens]

    @property
    def model_tokens(self) -> list[int]:
        """The sampled token ids, indexed by position."""
        return [token for segment in self.model_segments for token in segment.tokens]

    @property
    def sampled(self) -> list[int]:
        """Indices of the model tokens in `tokens`, ascending."""
        indices: list[int] = []
        start = 0
        for segment in self.segments:
            end = start + len(segment.tokens)
            if segment.kind == "model":
                indices.extend(range(start, end))
            start = end
        return indices

    @property
    def spans(self) -> list[Span]:
        """The policies of all model tokens, in order; neighbouring spans have different ones."""
        spans: list[Span] = []
        for segment in self.model_segments:
            for span in segment.spans:
                if spans and spans[-1].policy == span.policy:
                    spans[-1] = Span(span.policy, spans[-1].tokens + span.tokens)
                else:
                    spans.append(span)
        return spans

    @property
    def log_probabilities(self) -> list[float] | None:
        """One per model token; None unless every model segment has them."""
        values: list[float] = []
        for segment in self.model_segments:
            if segment.log_probabilities is None:
                return None
            values.extend(segment.log_probabilities)
        return values


def _check_segment(segment: Segment) -> None:
    count = len(segment.tokens)
    if count == 0:
        raise ValueError(f"a {segment.kind} segment has no token")
    if segment.kind != "model":
        if segment.finish is not None or segment.log_probabilities is not None or segment.spans:
            raise ValueError(f"a {segment.kind} segment was not sampled")
        return
    if segment.finish not in ("stop", "length"):
        raise ValueError(f"a model segment finishes with {segment.finish!r}")
    if segment.log_probabilities is not None and len(segment.log_probabilities) != count:
        raise ValueError(
            f"a model segment has {len(segment.log_probabilities)} log-probabilities for "
            f"{count} tokens"
        )
    if sum(span.tokens for span in segment.spans) != count or any(
        span.tokens < 1 for span in segment.spans
    ):
        raise ValueError(f"the spans of a model segment do not cover its {count} tokens")
