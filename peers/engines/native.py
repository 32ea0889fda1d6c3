"""The native engine: batches, a preallocated KV cache and sampling around the model's decoder.

Hidden states and log-probabilities cost nothing extra, and a prefill runs the same layers as
generation. In every row the cache slot equals the position in the sequence. Rows of different
lengths therefore need no left padding, and each row computes what it would compute alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from peers.engines.attention import LayerAttention, attend, attend_causally, unseen
from peers.engines.decoder import Decoder
from peers.engines.engine import Capabilities, Piece, Prefill, Request
from peers.engines.sampling import gumbel_noise, sample
from swarm import __version__
from swarm.world.progress import checkpoint

PROMPT_ROWS_MAX = 128
"""Hidden rows kept before a completion: a proof chunk needs 128 values, a row has at least 1."""

NOISE_ENTRIES_MAX = 1 << 20
"""Entries of noise computed ahead at once; computing this many takes about 40 MB."""

PREFILL_TOKENS_MAX = 1 << 14
"""Padded tokens in one forward pass; a larger batch takes several passes."""


@dataclass
class _NoiseAhead:
    """The noise of the live rows, computed for many steps at once."""

    key: tuple[int, int]
    rows: Tensor
    """Row of each prompt in its submission, int64 [B]."""
    starts: Tensor
    """Position of each prompt's first new token, int64 [B]."""
    steps: int
    vocabulary_size: int
    block: Tensor = field(default_factory=lambda: torch.empty(0))
    """[live, steps ahead, vocabulary]"""
    first: int = 0
    """The block's first step."""

    def at(self, step: int, live: Tensor) -> Tensor:
        """Noise [live, vocabulary] of the batch rows `live`, which are the block's rows."""
        if step == 0 or step == self.first + self.block.shape[1]:
            ahead = max(1, NOISE_ENTRIES_MAX // (len(live) * self.vocabulary_size))
            steps = torch.arange(step, min(step + ahead, self.steps), device=live.device)
            # A few rows at a time: a large vocabulary times all rows takes gigabytes.
            some = max(1, NOISE_ENTRIES_MAX // (len(steps) * self.vocabulary_size))
            parts = [
                gumbel_noise(
                    self.key,
                    self.rows[part, None],
                    self.starts[part, None] + steps,
                    self.vocabulary_size,
                )
                for part in torch.split(live, some)
            ]
            self.block, self.first = torch.cat(parts), step
        return self.block[:, step - self.first]


class NativeEngine:
    """See `peers.engines.engine.Engine`. Computes in the stored dtype, logits in fp32."""

    def __init__(
        self,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        policy: int = 0,
    ) -> None:
        """Load the policy in `folder`, whose number is `policy`.

        `dtype` is the precision to compute in; None: the weights' stored dtype. Raises `UserError`
        for an unsupported model.
        """
        self._decoder = decoder = Decoder(folder, device, dtype)
        self._device = decoder.device
        self._policy = policy
        self._waiting: dict[int, Request] = {}
        self._live: dict[int, Request] = {}
        self._running: Iterator[list[Piece]] | None = None
        self.capabilities = Capabilities(
            name="native",
            version=__version__,
            device=str(decoder.device),
            dtype=str(decoder.dtype).removeprefix("torch."),
            vocabulary_size=decoder.vocabulary_size,
            hidden_size=decoder.hidden_size,
            length_max=decoder.length_max,
        )

    def load_weights(self, folder: Path, policy: int) -> None:
        if self._live or self._waiting:
            raise ValueError("requests are being generated; cancel or finish them first")
        self._decoder.load_weights(folder)
        self._policy = policy

    def submit(self, request: Request) -> None:
        if request.id in self._waiting or request.id in self._live:
            raise ValueError(f"request {request.id} is already being generated")
        self._check_request(request)
        self._waiting[request.id] = request

    def cancel(self, id: int) -> None:
        self._waiting.pop(id, None)
        self._live.pop(id, None)
        if not self._live:
            self._running = None

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        if not self._live:
            batch = self._next_batch()
            if not batch:
                return []
            self._live = {request.id: request for request in batch}
            self._running = self._generate(batch)
        assert self._running is not None
        made = [piece for piece in next(self._running) if piece.id in self._live]
        for piece in made:
            del self._live[piece.id]
        return made

    def _next_batch(self) -> list[Request]:
        """Take the waiting requests that share the first one's sampling settings."""
        batch: list[Request] = []
        for request in self._waiting.values():
            first = batch[0] if batch else request
            if (request.noise_key, request.temperature, request.stop_ids, request.limit) == (
                first.noise_key,
                first.temperature,
                first.stop_ids,
                first.limit,
            ):
                batch.append(request)
        for request in batch:
            del self._waiting[request.id]
        return batch

    def _generate(self, requests: list[Request]) -> Iterator[list[Piece]]:
        """Generate a batch; yield, after each step, what finished in it."""
        first = requests[0]
        prompts, starts = [each.tokens for each in requests], [each.start for each in requests]
        count, steps = len(requests), first.limit - min(starts)
        keys, values, hidden, prompt_hidden = self._prefill_prompts(prompts, new_slots=steps)
        tokens = torch.zeros(count, steps, dtype=torch.long, device=self._device)
        log_mu = torch.zeros(count, steps, device=self._device)
        states = torch.empty(
            count, steps, self.capabilities.hidden_size, dtype=torch.bfloat16, device=self._device
        )
        lengths = torch.zeros(count, dtype=torch.long, device=self._device)  # 0: unfinished
        stops = torch.zeros(self.capabilities.vocabulary_size, dtype=torch.bool)
        stops[list(first.stop_ids)] = True
        stops = stops.to(self._device)
        live = torch.arange(count, device=self._device)  # batch row of each cache row
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        limits = first.limit - torch.tensor(starts, device=self._device)
        noise = None
        if first.noise_key is not None:
            rows = [each.row for each in requests]
            row_of, start_of = torch.tensor([rows, starts], device=self._device)
            noise = _NoiseAhead(
                first.noise_key, row_of, start_of, steps, self.capabilities.vocabulary_size
            )

        for step in range(steps):
            logits = self.logits(hidden)  # [live, vocabulary]
            chosen = sample(logits, noise.at(step, live) if noise else None, first.temperature)
            tokens[live, step] = chosen
            log_all = torch.log_softmax(logits / first.temperature, -1)
            log_mu[live, step] = log_all.gather(-1, chosen[:, None])[:, 0]
            states[live, step] = hidden.to(torch.bfloat16)
            ended = (stops[chosen] | (limits[live] == step + 1)) & (lengths[live] == 0)
            finished: list[int] = []
            if bool(ended.any()):
                finished = live[ended].tolist()
                lengths[live[ended]] = step + 1
            yield [
                Piece(
                    id=requests[row].id,
                    tokens=(made := tokens[row, : step + 1].tolist()),
                    hidden=states[row, : step + 1].clone(),
                    log_probabilities=log_mu[row, : step + 1].clone(),
                    prompt_hidden=prompt_hidden[row],
                    finish="stop" if made[-1] in first.stop_ids else "length",
                    spans=[(self._policy, step + 1)],
                )
                for row in finished
            ]
            if finished:
                going = (lengths[live] == 0).nonzero()[:, 0]
                if len(going) <= len(live) // 2:  # copying the cache pays once half of it is idle
                    live, chosen = live[going], chosen[going]
                    keys = [cache[going] for cache in keys]
                    values = [cache[going] for cache in values]
                    if noise:
                        noise.block = noise.block[going]
            hidden = self._decode(chosen, prompt_lengths[live] + step, keys, values)

    @torch.no_grad()
    def prefill(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
    ) -> Prefill:
        if len(sampled) != len(sequences):
            raise ValueError(f"{len(sampled)} lists of indices for {len(sequences)} sequences")
        result = Prefill([], [], [])
        inputs = []
        for tokens, indices in zip(sequences, sampled, strict=True):
            self._check_tokens(tokens, len(tokens))
            if not indices or indices[0] < 1 or indices[-1] != len(tokens) - 1:
                raise ValueError(
                    "sampled tokens must begin after the prompt and end at the last token"
                )
            inputs.append(list(tokens[:-1]))  # the last token predicts nothing
        start = 0
        while start < len(inputs):
            checkpoint()
            end = _batch_end(inputs, start)
            hidden = self._causal(inputs[start:end])
            for index in range(start, end):
                # Token i was sampled from the hidden state of token i − 1.
                predictors = torch.tensor(list(sampled[index]), device=self._device) - 1
                rows = hidden[index - start, predictors]
                result.states.append(rows)
                result.hidden.append(rows.to(torch.bfloat16))
                first = sampled[index][0] - 1
                before = hidden[index - start, max(0, first - PROMPT_ROWS_MAX) : first]
                result.prompt_hidden.append(before.to(torch.bfloat16))
            start = end
        return result

    def logits(self, states: Tensor) -> Tensor:
        return self._decoder.logits(states)

    def _check_request(self, request: Request) -> None:
        """Raise `ValueError` as `Engine.submit` promises."""
        if request.stop_ids:
            self._check_tokens(request.stop_ids, length=0)
        if not 0 <= request.start < request.limit:
            raise ValueError(f"no position from {request.start} is below the limit {request.limit}")
        length = len(request.tokens) + request.limit - request.start
        self._check_tokens(request.tokens, length)

    def _check_tokens(self, tokens: Sequence[int], length: int) -> None:
        if not tokens:
            raise ValueError("a prompt has no token")
        vocabulary_size = self.capabilities.vocabulary_size
        if min(tokens) < 0 or max(tokens) >= vocabulary_size:
            raise ValueError(f"a token id lies outside the vocabulary of {vocabulary_size}")
        length_max = self.capabilities.length_max
        if length > length_max:
            raise ValueError(f"{length} positions are needed; the context length is {length_max}")

    def _prefill_prompts(
        self, prompts: Sequence[Sequence[int]], new_slots: int
    ) -> tuple[list[Tensor], list[Tensor], Tensor, list[Tensor]]:
        """Fill new KV caches from B prompts, with free slots for `new_slots` tokens of each row.

        A group's samples share their prompt, so each distinct prompt is computed once. Returns keys
        and values ([B, H_kv, slots, D] per layer), each prompt's last hidden state [B, hidden], and
        `Piece.prompt_hidden`.
        """
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        index_of = {prompt: index for index, prompt in enumerate(distinct)}
        source = [index_of[tuple(prompt)] for prompt in prompts]
        index = torch.tensor(source, device=self._device)
        slots = max(map(len, distinct)) + new_slots
        shape = (len(prompts), self._decoder.kv_heads, slots, self._decoder.head_size)
        dtype = self._decoder.dtype
        keys = [torch.empty(shape, dtype=dtype, device=self._device) for _ in self._decoder.layers]
        # A slot not yet written has weight 0, but 0 times uninitialised memory may be NaN.
        values = [
            torch.zeros(shape, dtype=dtype, device=self._device) for _ in self._decoder.layers
        ]

        def keep(layer: int, key: Tensor, value: Tensor) -> None:
            keys[layer][:, :, : key.shape[2]] = key[index]
            values[layer][:, :, : value.shape[2]] = value[index]

        hidden = self._causal(distinct, keep)
        states = [hidden[each, : len(prompt)] for each, prompt in enumerate(distinct)]
        before = [rows[:-1][-PROMPT_ROWS_MAX:].to(torch.bfloat16) for rows in states]
        last = torch.stack([rows[-1] for rows in states])[index]
        return keys, values, last, [before[each] for each in source]

    def _causal(
        self,
        sequences: Sequence[Sequence[int]],
        keep: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """Final-norm hidden states [B, longest, hidden].

        Rows are padded on the right, where causal attention does not see the padding.
        """
        longest = max(len(sequence) for sequence in sequences)
        padded = [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences]
        tokens = torch.tensor(padded, device=self._device)

        def attention(layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if keep is not None:
                keep(layer.index, key, value)
            return attend_causally(layer, query, key, value)

        return self._decoder.forward(tokens, torch.arange(longest, device=self._device), attention)

    def _decode(
        self, tokens: Tensor, positions: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """Process one more token per row and write it to the cache.

        Returns final-norm hidden states [B, hidden].
        """
        rows = torch.arange(len(tokens), device=self._device)
        lowest, used = int(positions.min()), int(positions.max()) + 1
        level = lowest + 1 == used

        @functools.cache
        def seen(window: int | None) -> tuple[slice, Tensor | None]:
            """The slots that some row sees, and which of them each row does not."""
            slots = slice(0 if window is None else max(0, lowest - window + 1), used)
            if level:
                return slots, None
            index = torch.arange(slots.start, used, device=self._device)
            return slots, unseen(positions[:, None], index, window)[:, None, None]

        def attention(layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cached, cached_values = keys[layer.index], values[layer.index]
            if level:
                cached[:, :, used - 1] = key[:, :, 0]
                cached_values[:, :, used - 1] = value[:, :, 0]
            else:
                cached[rows, :, positions] = key[:, :, 0]
                cached_values[rows, :, positions] = value[:, :, 0]
            slots, blocked = seen(layer.window)
            return attend(layer, query, cached[:, :, slots], cached_values[:, :, slots], blocked)

        return self._decoder.forward(tokens[:, None], positions[:, None], attention)[:, 0]


def _batch_end(sequences: list[list[int]], start: int) -> int:
    """End index of the longest batch from `start` with at most `PREFILL_TOKENS_MAX` tokens."""
    longest, end = len(sequences[start]), start + 1
    while end < len(sequences):
        longest = max(longest, len(sequences[end]))
        if longest * (end + 1 - start) > PREFILL_TOKENS_MAX:
            break
        end += 1
    return end
