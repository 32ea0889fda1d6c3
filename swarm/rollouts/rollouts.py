"""The canonical form of a submission's rollouts, plain arrays, and the parts of their rewards.

The process that parses the hostile file writes them; the processes that recompute and train read
them. Proof, reward and training therefore use the same token array."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import blake3
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from swarm.rollouts.rollout import TURNS_MAX, Finish, Kind, Rollout, Segment, Span
from swarm.wire.messages import REWARD_PARTS_MAX, REWARD_VALUES_MAX, RewardParts, Rewards

NAME_CHARACTERS_MAX = 200
"""Longest name of a part; the rest of a longer one is cut off."""


def bounded(parts: Mapping[str, float]) -> dict[str, float]:
    """The first parts by name, as many as a message may have."""
    return {name[:NAME_CHARACTERS_MAX]: parts[name] for name in sorted(parts)[:REWARD_PARTS_MAX]}


def parts_of(rollouts: Sequence[Mapping[str, float]]) -> RewardParts:
    """The parts of all rollouts of a submission; of too many, the first by name."""
    found = [bounded(each) for each in rollouts]
    fit = min(REWARD_PARTS_MAX, REWARD_VALUES_MAX // max(1, len(found)) - 1)
    names = sorted({name for each in found for name in each})[: max(0, fit)]
    with np.errstate(over="ignore"):  # what float32 cannot hold is left out
        values = np.array([[each.get(name, np.nan) for each in found] for name in names], "<f4")
    return RewardParts(names=names, values=values.tobytes())


def parts_in(parts: RewardParts, rewards: Rewards, group: int) -> list[dict[str, float]]:
    """The parts of a group's rewards, by sample; nothing if they do not fit the rewards."""
    count, size = sum(map(len, rewards)), len(rewards[group])
    if len(parts.values) != 4 * len(parts.names) * count:
        return [{} for _ in range(size)]
    values = np.frombuffer(parts.values, "<f4").reshape(len(parts.names), count)
    first = sum(map(len, rewards[:group]))
    return [
        {
            name: float(value)
            for name, value in zip(parts.names, values[:, row], strict=True)
            if math.isfinite(value)
        }
        for row in range(first, first + size)
    ]


def mean_parts(rollouts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each part over the rollouts that have it."""
    found: dict[str, list[float]] = {}
    for each in rollouts:
        for name, value in each.items():
            found.setdefault(name, []).append(value)
    return {name: sum(found[name]) / len(found[name]) for name in sorted(found)}


Integers = NDArray[np.int32]
Floats = NDArray[np.float32]
Offsets = NDArray[np.int64]

KINDS: tuple[Kind, ...] = ("prompt", "model", "environment")
"""Segment kinds; arrays and files hold the index."""
PROMPT, MODEL, ENVIRONMENT = range(3)

FINISHES: tuple[Finish | None, ...] = (None, "stop", "length")
"""Finish reasons; arrays and files hold the index."""
_LENGTH = FINISHES.index("length")


@dataclass(frozen=True)
class Row:
    """One rollout of a submission."""

    group: int
    sample: int
    environment: int
    """Index among the run's environments; the same for a whole group."""
    rollout: Rollout
    proof: bytes
    """Concatenated TOPLOC proofs."""


@dataclass(frozen=True)
class Rollouts:
    """R rollouts. Lists of all rows are concatenated; row i has `offsets[i] : offsets[i + 1]`.

    Every array of offsets is [R + 1] and begins with 0."""

    group: Integers
    """[R]."""
    sample: Integers
    """[R]."""
    environment: Integers
    """[R] Indices among the run's environments."""
    tokens: Integers
    """Token ids of all segments, in order."""
    token_offsets: Offsets
    segment_kinds: Integers
    segment_lengths: Integers
    """Tokens per segment."""
    segment_finishes: Integers
    segment_offsets: Offsets
    log_probabilities: Floats
    """One per model token."""
    model_offsets: Offsets
    """Offsets in `log_probabilities`, and equally in the model tokens of all rows."""
    span_policies: Integers
    """The policy of each span of model tokens; neighbouring spans in a row differ."""
    span_lengths: Integers
    """Tokens per span."""
    span_offsets: Offsets
    proofs: NDArray[np.uint8]
    """Bytes of all proofs."""
    proof_offsets: Offsets

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> "Rollouts":
        """Convert rows to arrays; raises `ValueError` for a row without log-probabilities."""
        segments = [row.rollout.segments for row in rows]
        flat = list(itertools.chain(*segments))
        log_probabilities = [row.rollout.log_probabilities for row in rows]
        reported = [values for values in log_probabilities if values is not None]
        if len(reported) != len(rows):
            raise ValueError("a rollout of a submission needs log-probabilities")
        spans = [row.rollout.spans for row in rows]
        result = cls(
            group=_integers(row.group for row in rows),
            sample=_integers(row.sample for row in rows),
            environment=_integers(row.environment for row in rows),
            tokens=_integers(itertools.chain(*(each.tokens for each in flat))),
            token_offsets=_offsets([sum(len(each.tokens) for each in some) for some in segments]),
            segment_kinds=_integers(KINDS.index(each.kind) for each in flat),
            segment_lengths=_integers(len(each.tokens) for each in flat),
            segment_finishes=_integers(FINISHES.index(each.finish) for each in flat),
            segment_offsets=_offsets([len(some) for some in segments]),
            log_probabilities=np.array(list(itertools.chain(*reported)), np.float32),
            model_offsets=_offsets([len(values) for values in reported]),
            span_policies=_integers(span.policy for some in spans for span in some),
            span_lengths=_integers(span.tokens for some in spans for span in some),
            span_offsets=_offsets([len(some) for some in spans]),
            proofs=np.frombuffer(b"".join(row.proof for row in rows), np.uint8),
            proof_offsets=_offsets([len(row.proof) for row in rows]),
        )
        result.check()
        return result

    def __len__(self) -> int:
        return len(self.group)

    def row(self, index: int) -> Row:
        return Row(
            group=int(self.group[index]),
            sample=int(self.sample[index]),
            environment=int(self.environment[index]),
            rollout=self.rollout(index),
            proof=self.proof(index),
        )

    def rollout(self, index: int) -> Rollout:
        return Rollout(tuple(self._segments(index)))

    def row_tokens(self, index: int) -> Integers:
        """All token ids of one row, in order."""
        return _part(self.tokens, self.token_offsets, index)

    def proof(self, index: int) -> bytes:
        """One row's concatenated proofs."""
        return _part(self.proofs, self.proof_offsets, index).tobytes()

    def span_lengths_of(self, index: int) -> list[int]:
        """Tokens of each of one row's spans."""
        return list(_part(self.span_lengths, self.span_offsets, index).tolist())

    def prompt(self, index: int) -> list[int]:
        """Token ids of one row's first segment."""
        start = self.token_offsets[index]
        length = self.segment_lengths[self.segment_offsets[index]]
        return list(self.tokens[start : start + length].tolist())

    def segment_counts(self) -> Offsets:
        """[R] Number of segments of each row."""
        return np.diff(self.segment_offsets)

    def model_lengths(self) -> Offsets:
        """[R] Number of model tokens of each row."""
        return np.diff(self.model_offsets)

    def to_bytes(self) -> bytes:
        """The arrays in safetensors format, which holds no code."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        return bytes(safetensors.numpy.save(arrays))

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Rollouts":
        """Decode the output of `to_bytes`; raises `ValueError` for anything else."""
        try:
            arrays = safetensors.numpy.load(raw)
        except safetensors.SafetensorError as error:
            raise ValueError(f"these bytes are no rollouts ({error})") from error
        if {name: array.dtype for name, array in arrays.items()} != _ARRAYS:
            raise ValueError("these arrays are no rollouts")
        if any(array.ndim != 1 for array in arrays.values()):
            raise ValueError("an array of rollouts is not flat")
        result = cls(**arrays)
        result.check()
        return result

    def check(self) -> None:
        """Raise `ValueError` unless the arrays are consistent and every row is an episode."""
        rows = len(self.group)
        if rows == 0 or len(self.sample) != rows or len(self.environment) != rows:
            raise ValueError("columns of rollouts are empty or differ in length")
        for offsets, flat in (
            (self.token_offsets, self.tokens),
            (self.segment_offsets, self.segment_kinds),
            (self.segment_offsets, self.segment_lengths),
            (self.segment_offsets, self.segment_finishes),
            (self.model_offsets, self.log_probabilities),
            (self.span_offsets, self.span_policies),
            (self.span_offsets, self.span_lengths),
            (self.proof_offsets, self.proofs),
        ):
            if len(offsets) != rows + 1 or offsets[0] != 0 or offsets[-1] != len(flat):
                raise ValueError("offsets of rollouts do not fit their values")
            if (offsets[1:] < offsets[:-1]).any():
                raise ValueError("offsets of rollouts run backwards")
        if self.environment.min() < 0:
            raise ValueError("the index of an environment is negative")
        self._check_segments()
        self._check_spans()

    def _check_segments(self) -> None:
        counts = np.diff(self.segment_offsets)
        if (counts % 2 != 0).any() or counts.min() < 2 or counts.max() > 2 * TURNS_MAX:
            raise ValueError(
                f"a rollout has {counts.min()} to {counts.max()} segments; it must have an even "
                f"number from 2 to {2 * TURNS_MAX}"
            )
        index = np.arange(len(self.segment_kinds)) - np.repeat(self.segment_offsets[:-1], counts)
        expected = np.where(index == 0, PROMPT, np.where(index % 2 == 1, MODEL, ENVIRONMENT))
        if (self.segment_kinds != expected).any():
            raise ValueError("segments are not a prompt, then model and environment in turn")
        if self.segment_lengths.min() < 1:
            raise ValueError("a segment has no token")
        model = self.segment_kinds == MODEL
        sampled = (self.segment_finishes > 0) & (self.segment_finishes < len(FINISHES))
        if (sampled != model).any() or self.segment_finishes[~model].any():
            raise ValueError("a model segment has no finish reason, or another segment has one")
        last = index == np.repeat(counts, counts) - 1
        if ((self.segment_finishes == _LENGTH) & ~last).any():
            raise ValueError("a model segment at the token limit is not the last")
        lengths = self.segment_lengths.astype(np.int64)
        sums = np.add.reduceat(lengths, self.segment_offsets[:-1])
        if (sums != np.diff(self.token_offsets)).any():
            raise ValueError("the lengths of segments do not add up to the tokens")
        sums = np.add.reduceat(np.where(model, lengths, 0), self.segment_offsets[:-1])
        if (sums != self.model_lengths()).any():
            raise ValueError("log-probabilities and model tokens differ in number")

    def _check_spans(self) -> None:
        counts = np.diff(self.span_offsets)
        if counts.min() < 1 or self.span_lengths.min() < 1 or self.span_policies.min() < 0:
            raise ValueError("a span of model tokens is missing, empty or of no policy")
        sums = np.add.reduceat(self.span_lengths.astype(np.int64), self.span_offsets[:-1])
        if (sums != self.model_lengths()).any():
            raise ValueError("the spans of policies do not add up to the model tokens")
        first = np.zeros(len(self.span_policies), bool)
        first[self.span_offsets[:-1]] = True
        if (self.span_policies[1:] == self.span_policies[:-1])[~first[1:]].any():
            raise ValueError("neighbouring spans have the same policy")

    def _segments(self, index: int) -> Iterable[Segment]:
        tokens = _part(self.tokens, self.token_offsets, index).tolist()
        reported = _part(self.log_probabilities, self.model_offsets, index).tolist()
        policies = _part(self.span_policies, self.span_offsets, index).tolist()
        lengths = _part(self.span_lengths, self.span_offsets, index).tolist()
        spans = [Span(*each) for each in zip(policies, lengths, strict=True)]
        columns = (self.segment_kinds, self.segment_lengths, self.segment_finishes)
        parts = [_part(column, self.segment_offsets, index).tolist() for column in columns]
        start = sampled = 0
        for kind, length, finish in zip(*parts, strict=True):
            part = tokens[start : start + length]
            start += length
            if kind != MODEL:
                yield Segment(KINDS[kind], part)
                continue
            own, spans = _cut(spans, length)
            yield Segment(
                "model", part, FINISHES[finish], reported[sampled : sampled + length], tuple(own)
            )
            sampled += length


_ARRAYS: dict[str, np.dtype[Any]] = {
    field.name: np.dtype(np.int64 if field.name.endswith("_offsets") else np.int32)
    for field in fields(Rollouts)
} | {"log_probabilities": np.dtype(np.float32), "proofs": np.dtype(np.uint8)}
"""Type of each array, by name."""


def check_digest(raw: bytes, digest: bytes | None) -> None:
    """Raise `OSError` unless `digest` is the BLAKE3-256 of `raw`; None skips the check."""
    if digest is not None and blake3.blake3(raw).digest() != digest:
        raise OSError("the file has changed since it arrived: its hash differs")


def _cut(spans: Sequence[Span], length: int) -> tuple[list[Span], list[Span]]:
    """Split spans into (those of the first `length` tokens, those of the other tokens)."""
    own, rest = [], list(spans)
    while length:
        span = rest.pop(0)
        own.append(Span(span.policy, min(span.tokens, length)))
        if span.tokens > length:
            rest.insert(0, Span(span.policy, span.tokens - length))
        length -= own[-1].tokens
    return own, rest


def _integers(values: Iterable[int]) -> Integers:
    return np.array(list(values), np.int32)


def _offsets(lengths: Sequence[int]) -> Offsets:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64)


def _part(flat: NDArray[Any], offsets: Offsets, index: int) -> NDArray[Any]:
    return flat[offsets[index] : offsets[index + 1]]
