"""Decoding on a GPU by CUDA graphs: one launch for a whole step.

A decoding step is thousands of short kernels, and launching them one by one takes longer than
computing them. A `StaticStep` reads and writes the same tensors whenever it runs, so that its
kernels can be recorded once and replayed. Each layout of the live rows in the cache's buckets has a
step of its own. It attends to whole buckets, and to more rows than are live; masks and the cache's
spare rows make up for that. Weights stay where they are at a swap, so a graph outlives it.

Only the recording needs a GPU: the tests run the same steps on a CPU. No graph was ever recorded
yet.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from peers.engines.attention import LayerAttention, unseen
from peers.engines.cache import Bucket, Cache
from peers.engines.decoder import Decoder
from peers.engines.flat import as_mask, attend_decoding
from peers.engines.rows import Row
from peers.engines.sampling import keyed_noise

GRAPHS_MAX = 64
"""Steps that are kept. Each takes a few MB for its kernels."""

IDLE_DRAWS = 1000
"""Decoding steps after which an unused one may go for another: recording takes as long as tens of
ordinary steps."""

WARM_UPS = 2
"""Runs before the recording, in which libraries allocate their workspaces and compile kernels."""

Replay = Callable[[], None]
Capture = Callable[["StaticStep"], Replay]
"""Records a step; what it returns runs the step again."""

Drawn = tuple[Row, int, float]
"""A row, its next token and that token's log-probability."""


@dataclass(frozen=True)
class Layout:
    """All that the kernels of a step depend on."""

    parts: tuple[tuple[int, int], ...]
    """Per bucket with rows: the number of its memory (`Bucket.memory`), and rows computed."""
    noise: Literal["all", "some", "none"]
    """The rows that have a noise key."""
    scaled: bool
    """Whether any row has a temperature other than 1."""


@dataclass
class _Part:
    """The first rows of one bucket."""

    bucket: Bucket[Any]
    tokens: slice
    """The rows' indices among all tokens."""
    rows: Tensor
    """Their indices in the bucket."""


class StaticStep:
    """One decoding step over fixed tensors: `fill`, run, `read`."""

    def __init__(
        self, decoder: Decoder, layout: Layout, buckets: Sequence[Bucket[Any]], entries_max: int
    ) -> None:
        """`buckets` are those of the layout. At most `entries_max` logits exist at once."""
        self._decoder, self._layout = decoder, layout
        self._rows_max = max(1, entries_max // decoder.vocabulary_size)
        device = decoder.device
        self._parts = []
        count = 0
        for bucket, (_, rows) in zip(buckets, layout.parts, strict=True):
            index = torch.arange(rows, device=device)
            self._parts.append(_Part(bucket, slice(count, count + rows), index))
            count += rows
        self._length = max(bucket.columns for bucket in buckets)
        pinned = device.type == "cuda"
        # Token, position in the sequence, noise row, position in the episode, two words of the key,
        # and whether there is a key.
        self._host = torch.zeros(7, count, dtype=torch.int64, pin_memory=pinned)
        self._host_temperatures = torch.ones(count, pin_memory=pinned)
        self._inputs = self._host.to(device, copy=True)
        self._temperatures = self._host_temperatures.to(device, copy=True)
        self._drawn = torch.zeros(2, count, dtype=torch.float64, device=device)
        self._masks: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}

    def fill(self) -> None:
        """Put in the newest tokens of the buckets' rows.

        The host's tensors may be written, because `read` has waited for the step before.
        """
        self._host.zero_()  # a spare row computes token 0 at position 0, which nothing reads
        self._host_temperatures.fill_(1.0)
        for part in self._parts:
            rows: Sequence[Row] = part.bucket.rows
            here = slice(part.tokens.start, part.tokens.start + len(rows))
            self._host[:, here] = torch.tensor([_inputs(row) for row in rows]).t()
            if self._layout.scaled:
                temperatures = [row.request.temperature for row in rows]
                self._host_temperatures[here] = torch.tensor(temperatures)
        self._inputs.copy_(self._host, non_blocking=True)
        self._temperatures.copy_(self._host_temperatures, non_blocking=True)

    def __call__(self) -> None:
        """Compute; every tensor that is read or written outside exists before and after."""
        decoder, (tokens, positions) = self._decoder, self._inputs[:2]
        self._masks.clear()
        hidden = decoder.forward(tokens[None], positions[None], self._attend, self._length)[0]
        for part in self._parts:
            states = part.bucket.states
            states[part.rows, positions[part.tokens]] = hidden[part.tokens].to(states.dtype)
        for start in range(0, len(hidden), self._rows_max):
            here = slice(start, start + self._rows_max)
            self._draw(here, hidden[here])

    def read(self) -> list[Drawn]:
        """What the live rows drew. Waits for the step."""
        tokens, values = self._drawn.tolist()
        return [
            (row, int(tokens[at]), values[at])
            for part in self._parts
            for at, row in enumerate(part.bucket.rows, part.tokens.start)
        ]

    def _draw(self, here: slice, hidden: Tensor) -> None:
        logits = self._decoder.logits(hidden)
        if self._layout.scaled:
            logits = logits / self._temperatures[here, None]
        perturbed = logits
        if self._layout.noise != "none":
            rows, positions, *keys, keyed = self._inputs[2:, here]
            noise = keyed_noise(torch.stack(keys, dim=1), rows, positions, logits.shape[-1])
            if self._layout.noise == "some":
                noise.masked_fill_(keyed[:, None] == 0, 0.0)
            perturbed = noise.add_(logits)
        chosen = perturbed.max(-1).indices
        log_mu = torch.log_softmax(logits, -1).gather(-1, chosen[:, None])[:, 0]
        self._drawn[0, here] = chosen.double()
        self._drawn[1, here] = log_mu.double()

    def _attend(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries [1, H, T, D], keys and values [1, H_kv, T, D] → [1, H, T, D]."""
        queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
        mixed = []
        for part in self._parts:
            here, bucket = part.tokens, part.bucket
            positions = self._inputs[1, here]
            cached = [caches[layer.index] for caches in (bucket.keys, bucket.values)]
            for cache, new in zip(cached, (keys, values), strict=True):
                cache[part.rows, :, positions] = new[here]
            blocked, mask = self._blocked(part, layer.window)
            count = len(part.rows)
            mixed.append(
                attend_decoding(
                    layer, queries[here], cached[0][:count], cached[1][:count], blocked, mask
                )
            )
        return torch.cat(mixed).transpose(0, 1)[None]

    def _blocked(self, part: _Part, window: int | None) -> tuple[Tensor, Tensor]:
        """The columns that a row does not see, as `attend_decoding` takes them."""
        key, decoder = (part.tokens.start, window), self._decoder
        if key not in self._masks:
            columns = torch.arange(part.bucket.columns, device=decoder.device)
            blocked = unseen(self._inputs[1, part.tokens, None], columns, window)[:, None, None]
            self._masks[key] = (blocked, as_mask(blocked, decoder.kv_heads, decoder.dtype))
        return self._masks[key]


@dataclass
class _Recorded:
    step: StaticStep
    replay: Replay
    used: int = 0
    """The number of the decoding step that it last computed."""


class Graphs:
    """The steps of an engine, by layout."""

    def __init__(
        self, decoder: Decoder, cache: Cache[Row], entries_max: int, capture: Capture | None
    ) -> None:
        """`capture`: how steps are recorded; None: never. `entries_max`: see `StaticStep`."""
        self._decoder, self._cache, self._entries_max = decoder, cache, entries_max
        self._capture = capture
        self._met: set[Layout] = set()
        self._steps: OrderedDict[Layout, _Recorded] = OrderedDict()
        """The one unused for longest first."""
        self._draws = 0
        self.captures = self.replays = 0
        """How often a step was recorded, and how often one was run."""
        if capture is not None and any(each.experts for each in decoder.model.layers):
            self._stop("a mixture of experts sorts its tokens on the host")

    @property
    def recording(self) -> bool:
        """Whether steps are recorded, so that a cache's memory is worth keeping where it is."""
        return self._capture is not None

    def draw(self) -> list[Drawn] | None:
        """Decode all live rows by one token; None if no graph computes their layout.

        The cache holds every row but its newest token.
        """
        if self._capture is None:
            return None
        self._draws += 1
        buckets = [bucket for bucket in self._cache.buckets if bucket.rows]
        layout = layout_of(buckets)
        if layout not in self._steps:
            if layout not in self._met:
                # One step alone is not worth a recording.
                self._forget_moved()
                self._met.add(layout)
                return None
            if not self._has_room() or not self._record(layout, buckets):
                return None
        self._steps.move_to_end(layout)
        recorded = self._steps[layout]
        recorded.used = self._draws
        recorded.step.fill()
        recorded.replay()
        self.replays += 1
        return recorded.step.read()

    def clear(self) -> None:
        """Free the memory of all graphs."""
        self._steps.clear()
        self._met.clear()

    def _has_room(self) -> bool:
        """Whether another step may be kept, after one that has been idle for long has gone."""
        if len(self._steps) < GRAPHS_MAX:
            return True
        layout, longest = next(iter(self._steps.items()))
        if self._draws - longest.used < IDLE_DRAWS:
            return False
        del self._steps[layout]
        return True

    def _record(self, layout: Layout, buckets: Sequence[Bucket[Any]]) -> bool:
        """Record a step; False, and no graph from now on, if that fails."""
        assert self._capture is not None
        try:
            step = StaticStep(self._decoder, layout, buckets, self._entries_max)
            step.fill()
            self._steps[layout] = _Recorded(step, self._capture(step))
        except Exception as error:  # drivers and libraries fail in many ways
            first = str(error).partition("\n")[0]
            self._stop(f"one could not be recorded ({type(error).__name__}: {first})")
            return False
        self.captures += 1
        return True

    def _forget_moved(self) -> None:
        """Drop the steps over memory that no bucket has any more."""
        there = {bucket.memory for bucket in self._cache.buckets}
        moved = [
            layout for layout in self._met if any(memory not in there for memory, _ in layout.parts)
        ]
        for layout in moved:
            self._met.discard(layout)
            self._steps.pop(layout, None)

    def _stop(self, reason: str) -> None:
        print(f"decoding goes on without CUDA graphs: {reason}", file=sys.stderr)
        self._capture = None
        self.clear()


def capture_graph(device: torch.device) -> Capture:
    """How steps are recorded as CUDA graphs on a device; all share their temporary memory."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(step: StaticStep) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads of the process copy proofs meanwhile, which must not end the recording.
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                step()
        return graph.replay

    return capture


def layout_of(buckets: Sequence[Bucket[Any]]) -> Layout:
    """The layout of the rows in buckets that all have some."""
    requests = [row.request for bucket in buckets for row in bucket.rows]
    keyed = [request.noise_key is not None for request in requests]
    return Layout(
        tuple((bucket.memory, _rounded(bucket)) for bucket in buckets),
        noise="all" if all(keyed) else "some" if any(keyed) else "none",
        scaled=any(request.temperature != 1.0 for request in requests),
    )


def _rounded(bucket: Bucket[Any]) -> int:
    """Rows to compute: 1, 2, 3, 4, 6, 8, 12, …, up to a third more than live; layouts are few."""
    power = 1 << (len(bucket.rows) - 1).bit_length()
    smaller = power // 4 * 3
    return min(smaller if len(bucket.rows) <= smaller else power, bucket.capacity)


def _inputs(row: Row) -> tuple[int, ...]:
    key = row.request.noise_key
    return (
        row.tokens[-1],
        row.length,
        row.request.row,
        row.position,
        *(key or (0, 0)),
        key is not None,
    )
