"""The layout of a batch in rows for the model.

There are two layouts. *Padded*: one sequence per row, rows of similar length together, padding at
the end, where causal attention cannot see it. *Packed*: several whole sequences per row, placed by
first-fit decreasing; positions restart, and attention stays within a sequence. A CPU has no
attention kernel for packed rows, so there the layout with the smaller estimated cost is used.
Identical sequences of a batch are computed once, and collect the gradients of all copies."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from peers.learning.batch import Batch

Layout = Literal["padded", "packed", "flat"]
"""`flat`: packed, one long row per pass, for kernels that skip masked blocks."""

PASS_TOKENS_MAX = 1 << 14
"""Tokens, padding included, in one forward pass; a larger batch accumulates gradients."""

BUCKET_TOKENS_MIN = 1 << 9
"""A pass of fewer tokens is not worth its fixed costs: rows of other lengths join it."""

BUCKET_FILL_MIN = 0.85
"""A row shorter than this share of a pass's longest row goes to the next pass."""

ATTENTION_TOKENS = 1024
"""Row length at which attention with an explicit mask costs as much as the rest of a small model.
In a larger model attention matters less. Only a CPU's choice of layout depends on it."""


@dataclass(frozen=True)
class Rows:
    """R rows of S input tokens for one forward pass, and the indices of its results in the batch.

    A sequence's last token predicts nothing, so it is not an input."""

    tokens: Tensor
    """Token ids, int64 [R, S]; padding is 0."""
    positions: Tensor
    """Position of each token in its sequence, from 0, int64 [R, S]."""
    sequence: Tensor
    """Index of each token's sequence in its row, from 0, int64 [R, S]; −1 is padding."""
    packed: bool
    """Whether a row may hold several sequences."""
    predictor: Tensor
    """Positions in the flattened rows whose logits predict `target`, int64 [m]."""
    target: Tensor
    """Completion tokens, with each distinct sequence once, int64 [m]."""
    source: Tensor
    """For each completion token of `index`, which of the m results belongs to it, int64 [k]."""
    index: Tensor
    """Indices among the batch's completion tokens, int64 [k]; completions are whole."""
    starts: Tensor
    """Where the first row's sequences begin and end, int32, on the host: no pass asks a GPU."""
    longest: int = 1
    """Tokens of the longest of these sequences."""
    temperature: float = 1.0
    """The temperature at which all its completions were sampled."""
    whole: Self | None = None
    """The rows of which these tokens are one rank's share (`sequence_parallel`); None: all."""

    def to(self, device: torch.device | str) -> Self:
        held = [name for name, value in vars(self).items() if isinstance(value, Tensor | Rows)]
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in held}
        return replace(self, **moved)


@dataclass(frozen=True)
class _Sequence:
    tokens: Tensor
    sampled: Tensor
    """Indices of the completion tokens in `tokens`, int64."""
    temperature: float
    copies: list[int]
    """Index of each copy's first completion token among the batch's completion tokens."""

    @property
    def inputs(self) -> int:
        return len(self.tokens) - 1


def lay_out(batch: Batch, layout: Layout | None = None, tokens_max: int = 0) -> list[Rows]:
    """Lay a batch out in forward passes of at most `tokens_max` tokens each.

    A longer sequence has a pass to itself. `layout` None takes the cheaper layout on a CPU, and
    `tokens_max` 0 is `PASS_TOKENS_MAX`."""
    most = tokens_max or PASS_TOKENS_MAX
    passes = []
    for sequences in _by_temperature(distinct(batch)):
        if layout == "flat":
            bins = first_fit([sequence.inputs for sequence in sequences], most)
            passes += [_rows([[sequences[each] for each in some]], packed=True) for some in bins]
            continue
        padded, packed = _pad(sequences, most), _pack(sequences, most)
        cheaper = _cost(padded, masked=False) <= _cost(packed, masked=True)
        if layout == "padded" or (layout is None and cheaper):
            passes += [_rows(rows, packed=False) for rows in padded]
        else:
            passes += [_rows(rows, packed=True) for rows in packed]
    return passes


def empty_rows() -> Rows:
    """A pass of one token without a result, for a rank that has fewer passes than the others."""
    one, none = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return Rows(
        tokens=one,
        positions=one,
        sequence=one,
        packed=False,
        predictor=one[0],
        target=one[0],
        source=none,
        index=none,
        starts=torch.tensor([0, 1], dtype=torch.int32),
    )


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack indices into `lengths` into bins, by first-fit decreasing.

    No sum exceeds `capacity`, except of one longer length. At most 11/9 of the fewest bins, + 1."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    free = np.full(len(lengths), capacity)
    bins: list[list[int]] = []
    for index in order:
        fitting = free[: len(bins)] >= lengths[index]
        chosen = int(fitting.argmax()) if fitting.any() else len(bins)
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(index)
        free[chosen] -= lengths[index]
    return bins


def distinct(batch: Batch) -> list[_Sequence]:
    """A batch's sequences without repeats, in order of first appearance."""
    found: dict[tuple[float, bytes, bytes], _Sequence] = {}
    start = 0
    for tokens, mask, temperature in zip(
        batch.split(batch.tokens),
        batch.split(batch.sampled),
        batch.temperature.tolist(),
        strict=True,
    ):
        # With the mask: the same tokens may be another conversation, whose turns end elsewhere.
        key = (temperature, tokens.numpy().tobytes(), mask.numpy().tobytes())
        sampled = mask.nonzero()[:, 0]
        sequence = found.setdefault(key, _Sequence(tokens, sampled, temperature, []))
        sequence.copies.append(start)
        start += len(sampled)
    return list(found.values())


def _by_temperature(sequences: list[_Sequence]) -> list[list[_Sequence]]:
    """Group sequences by temperature, which a run may change, in order of first appearance."""
    found: dict[float, list[_Sequence]] = {}
    for sequence in sequences:
        found.setdefault(sequence.temperature, []).append(sequence)
    return list(found.values())


_Pass = list[list[_Sequence]]


def _pad(sequences: list[_Sequence], most: int) -> list[_Pass]:
    """One sequence per row, longest first; a new pass where rows get too narrow or it too large."""
    passes: list[_Pass] = []
    width = 0
    for sequence in sorted(sequences, key=lambda each: -each.inputs):
        tokens = width * len(passes[-1]) if passes else 0
        narrow = sequence.inputs < BUCKET_FILL_MIN * width and tokens >= BUCKET_TOKENS_MIN
        if not passes or narrow or tokens + width > most:
            passes.append([])
            width = sequence.inputs
        passes[-1].append([sequence])
    return passes


def _pack(sequences: list[_Sequence], most: int) -> list[_Pass]:
    """Rows as wide as the longest sequence, filled first-fit decreasing."""
    width = max(sequence.inputs for sequence in sequences)
    bins = first_fit([sequence.inputs for sequence in sequences], width)
    rows = [[sequences[index] for index in some] for some in bins]
    count = max(1, most // max(1, width))
    return [rows[start : start + count] for start in range(0, len(rows), count)]


def _width(rows: _Pass) -> int:
    return max(sum(sequence.inputs for sequence in row) for row in rows)


def _cost(passes: list[_Pass], masked: bool) -> float:
    """Estimate a cost in tokens; attention costs half as much without an explicit mask."""
    attention = (1.0 if masked else 0.5) / ATTENTION_TOKENS
    total = 0.0
    for rows in passes:
        width = _width(rows)
        total += max(BUCKET_TOKENS_MIN, len(rows) * width) * (1 + width * attention)
    return total


def _rows(rows: _Pass, packed: bool) -> Rows:
    width = max(1, _width(rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    positions = torch.zeros_like(tokens)
    sequence = torch.full_like(tokens, -1)
    predictor, target, source, index = [], [], [], []
    computed = 0
    for row, members in enumerate(rows):
        column = 0
        for number, member in enumerate(members):
            here = slice(column, column + member.inputs)
            tokens[row, here] = member.tokens[:-1]
            positions[row, here] = torch.arange(member.inputs)
            sequence[row, here] = number
            # A token is predicted by the one before it, hence −1; each sequence begins with a
            # prompt. Copies share one result, to which each adds its gradient.
            wanted = member.tokens[member.sampled]
            predictor.append(row * width + column + member.sampled - 1)
            target.append(wanted)
            for copy in member.copies:
                source.append(torch.arange(computed, computed + len(wanted)))
                index.append(torch.arange(copy, copy + len(wanted)))
            computed += len(wanted)
            column += member.inputs
    # Only for flat passes, which have one row.
    lengths = [member.inputs for member in rows[0]]
    return Rows(
        tokens=tokens,
        positions=positions,
        sequence=sequence,
        packed=packed,
        predictor=torch.cat(predictor),
        target=torch.cat(target),
        source=torch.cat(source),
        index=torch.cat(index),
        starts=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        longest=max(lengths),
        temperature=rows[0][0].temperature,
    )
