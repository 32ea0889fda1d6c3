"""Teacher-forced hidden states of whole sequences: what a validator recomputes.

The tokens of many sequences lie in one dimension, so that the layers' products see one batch
without padding. Only attention tells sequences apart: it reads each sequence's own keys and no
others. Rows with the same prompt share its computation, equal rows all of theirs. The tokens of a
pass are bounded, and halved when memory is short."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from peers.engines.cache import STATE_DTYPE
from peers.engines.decoder import Decoder
from peers.engines.device import is_out_of_memory, upload
from peers.engines.engine import PROMPT_ROWS_MAX, Prefill
from peers.engines.layers import LayerAttention, attend_causally, attend_further
from swarm.errors import UserError
from swarm.world.progress import checkpoint

TOKENS_MAX = 1 << 14
"""Tokens in one pass on a GPU."""

TOKENS_MAX_CPU = 1 << 11
"""Tokens in one pass on a CPU: its caches hold what a layer computes for them."""

PADDING = 0.25
"""Rows attend together when the shorter ones are padded by at most this share, or by `SPARE`."""

SPARE = 8


@dataclass(eq=False)
class _Row:
    """A sequence without its last token, which predicts nothing."""

    index: int
    tokens: Sequence[int]
    sampled: Sequence[int]
    head: int = 0
    """Index of its prompt's first token in the pass; its own or another row's."""
    tail: int = 0
    """Index of its first token behind the prompt."""

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.sampled[0]


@dataclass
class _Together:
    """Segments that attend in one call: each attends to itself and to `past` tokens before it."""

    past: int
    firsts: list[int] = field(default_factory=list)
    """Per segment: index of its first token."""
    lengths: list[int] = field(default_factory=list)
    """In ascending order."""
    heads: list[int] = field(default_factory=list)
    """Per segment: index of the first of the tokens before it."""

    def takes(self, past: int, length: int) -> bool:
        """Whether another segment fits in; lengths come in ascending order."""
        return past == self.past and length - self.lengths[0] <= max(SPARE, PADDING * length)


@dataclass
class _Pass:
    rows: list[_Row] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(past, length, first, head)"""

    def append(self, tokens: Sequence[int], past: int = 0, head: int = 0) -> int:
        """Append a segment that lies behind `past` tokens; return its first index."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(past, past + len(tokens)))
        if tokens:
            self.segments.append((past, len(tokens), first, head))
        return first


class Prefiller:
    """Prefills with a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.tokens_max = TOKENS_MAX_CPU if decoder.device.type == "cpu" else TOKENS_MAX
        """Tokens in one pass, if no row has more."""

    @torch.no_grad()
    def run(self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]) -> Prefill:
        """See `Engine.prefill`; the arguments are checked."""
        rows = [
            _Row(index, list(tokens[:-1]), list(indices))
            for index, (tokens, indices) in enumerate(zip(sequences, sampled, strict=True))
        ]
        first: dict[tuple[tuple[int, ...], tuple[int, ...]], _Row] = {}
        twins = [first.setdefault((tuple(r.tokens), tuple(r.sampled)), r).index for r in rows]
        rows = list(first.values())
        prompts = Counter(tuple(row.tokens[: row.prompt]) for row in rows)
        rows.sort(key=lambda row: _place(row, prompts))
        states: dict[int, Tensor] = {}
        before: dict[int, Tensor] = {}
        done = 0
        while done < len(rows):
            checkpoint()
            part = _lay(rows[done:], self.tokens_max)
            try:
                hidden = self._forward(part)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(part, error)
                continue
            for row in part.rows:
                states[row.index], before[row.index] = _take(row, hidden)
            done += len(part.rows)
        return Prefill(
            [states[index].to(STATE_DTYPE) for index in twins],
            [states[index] for index in twins],
            [before[index] for index in twins],
        )

    def _halve(self, part: _Pass, error: Exception) -> None:
        """Put half as many tokens into a pass from now on."""
        if len(part.rows) == 1:
            raise UserError(
                f"device {self._decoder.device} has no memory to prefill {len(part.tokens)} tokens "
                "at once; use a device with more memory, or share the layers among several"
            ) from error
        self.tokens_max = max(1, len(part.tokens) // 2)
        if self._decoder.device.type == "cuda":
            torch.cuda.empty_cache()

    def _forward(self, part: _Pass) -> Tensor:
        """Final-norm hidden states [tokens, hidden]."""
        device, together = self._decoder.device, _together(part)
        attentions: dict[torch.device, list[_Attention]] = {}

        def attention(layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
            mixed = torch.empty_like(queries, memory_format=torch.contiguous_format)
            if query.device not in attentions:
                attentions[query.device] = [_Attention(each, query.device) for each in together]
            for each in attentions[query.device]:
                each.attend(layer, queries, keys, values, mixed)
            return mixed.transpose(0, 1)[None]

        given = upload([part.tokens, part.positions], device)
        return self._decoder.forward(given[:1], given[1:], attention, max(part.positions) + 1)[0]


class _Attention:
    """Segments that attend in one call, with their indices on the device."""

    def __init__(self, given: _Together, device: torch.device) -> None:
        self._past, lengths, firsts = given.past, given.lengths, given.firsts
        self._count, self._length = len(lengths), lengths[-1]
        self._first = firsts[0]
        ends = [first + length for first, length in zip(firsts, lengths, strict=True)]
        level = lengths[0] == lengths[-1] and firsts[1:] == ends[:-1]
        self._lies_together = level and not given.past
        if self._lies_together:
            return
        columns = torch.arange(self._length, device=device)
        first, length = torch.tensor([firsts, lengths], device=device)[:, :, None]
        # A padding key is later than all queries of its segment, so that none of them sees it.
        own = first + torch.minimum(columns, length - 1)
        heads = torch.tensor(given.heads, device=device)[:, None]
        before = heads + torch.arange(given.past, device=device)
        self._queries, self._keys = own, torch.cat((before, own), dim=1)
        self._filled = (columns < length).flatten().nonzero()[:, 0]
        self._targets = own.flatten()[self._filled]

    def attend(
        self, layer: LayerAttention, queries: Tensor, keys: Tensor, values: Tensor, mixed: Tensor
    ) -> None:
        """Fill the segments' tokens of `mixed`; all tensors are [T, heads, D]."""
        if self._lies_together:
            here = slice(self._first, self._first + self._count * self._length)
            query, key, value = (
                each[here].view(self._count, self._length, *each.shape[1:]).transpose(1, 2)
                for each in (queries, keys, values)
            )
            found = attend_causally(layer, query, key, value)
            mixed[here] = found.transpose(1, 2).flatten(0, 1)
            return
        query = queries[self._queries].transpose(1, 2)
        key, value = (each[self._keys].transpose(1, 2) for each in (keys, values))
        found = (
            attend_further(layer, query, key, value, self._past)
            if self._past
            else attend_causally(layer, query, key, value)
        )
        mixed[self._targets] = found.transpose(1, 2).flatten(0, 1)[self._filled]


def _place(row: _Row, prompts: Counter[tuple[int, ...]]) -> tuple[Any, ...]:
    """Where a row stands in the order: next to those that it shares its prompt or length with."""
    prompt = tuple(row.tokens[: row.prompt])
    if prompts[prompt] == 1:
        return False, len(row.tokens)
    return True, row.prompt, prompt, len(row.tokens)


def _lay(rows: Sequence[_Row], tokens_max: int) -> _Pass:
    """The next pass: rows with the same prompt follow each other and share it."""
    part = _Pass()
    head: _Row | None = None
    for row, following in zip_longest(rows, rows[1:]):
        shared = head is not None and _same_prompt(row, head)
        size = len(row.tokens) - (row.prompt if shared else 0)
        if part.rows and len(part.tokens) + size > tokens_max:
            break
        if shared and head is not None:
            row.head = head.head
        elif following is not None and _same_prompt(row, following):
            head = row
            row.head = part.append(row.tokens[: row.prompt])
        else:
            head = None
            row.head = part.append(row.tokens)
            row.tail = row.head + row.prompt
        if head is not None:
            row.tail = part.append(row.tokens[row.prompt :], row.prompt, row.head)
        part.rows.append(row)
    return part


def _same_prompt(row: _Row, other: _Row) -> bool:
    return row.prompt == other.prompt and row.tokens[: row.prompt] == other.tokens[: other.prompt]


def _together(part: _Pass) -> list[_Together]:
    """Segments of one pass that attend together."""
    found: list[_Together] = []
    for past, length, first, head in sorted(part.segments):
        if not found or not found[-1].takes(past, length):
            found.append(_Together(past))
        found[-1].firsts.append(first)
        found[-1].lengths.append(length)
        found[-1].heads.append(head)
    return found


def _take(row: _Row, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """A row's states, and those before them in the precision of proofs."""
    # Token i was sampled from the hidden state of token i − 1.
    index = [
        row.head + at - 1 if at <= row.prompt else row.tail + at - 1 - row.prompt
        for at in row.sampled
    ]
    end = row.head + row.prompt - 1
    rows = hidden[end - min(PROMPT_ROWS_MAX, row.prompt - 1) : end]
    return hidden[torch.tensor(index, device=hidden.device)], rows.to(STATE_DTYPE)
