"""The native engine over stages: this process embeds, samples and computes logits.

Each step advances every live row by one token through all stages in turn. A finished row is
replaced at once. Every row has a slot, its index in the stages' caches. What is not done yet: a
group's prompt is computed once per row, and a stage rests while another computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from peers.engines.architecture import describe
from peers.engines.config import read_supported_config
from peers.engines.embedding_and_head import EmbeddingAndHead
from peers.engines.engine import PROMPT_ROWS_MAX, Capabilities, Piece, Prefill, Request
from peers.engines.fitting import check_same, check_shapes
from peers.engines.model import StoredTensors
from peers.engines.noise import Ahead, OfRequest, draw
from peers.engines.pipeline.remote import RemoteStage
from peers.engines.pipeline.stage import LocalStage, Work, split_layers
from peers.engines.weights import Weights
from swarm.errors import UserError
from swarm.version import __version__
from swarm.world.progress import checkpoint

PREFILL_TOKENS_MAX = 1 << 13
"""Padded tokens in one pass."""

ENTRIES_MAX = 1 << 20
"""Rows times vocabulary sampled at once."""

SLOTS = 64
"""Rows generated at once, unless the settings say otherwise."""


@dataclass(eq=False)
class _Row(OfRequest):
    """A request being generated, or one whose cache is kept."""

    request: Request
    slot: int
    cached: int = 0
    """Positions in the caches."""
    feed: list[int] = field(default_factory=list)
    """Tokens that are not in the caches yet."""
    before: Tensor | None = None
    """bf16 [at most 128, hidden]: states of the positions before the first sampled token's."""
    tokens: list[int] = field(default_factory=list)
    last: Tensor = field(default_factory=lambda: torch.empty(0))
    """State [hidden], in full precision, from which the next token is sampled."""
    hidden: list[Tensor] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    noise: Ahead | None = None
    position: int = field(init=False)
    """Index of the next model token in the episode."""

    def __post_init__(self) -> None:
        self.position = self.request.start


class PipelineEngine:
    """See `peers.engines.engine.Engine`."""

    def __init__(
        self,
        folder: Path,
        stages: Sequence[LocalStage | RemoteStage],
        device: torch.device,
        dtype: torch.dtype,
        *,
        policy: int = 0,
        slots: int = 0,
        layers: Sequence[int] = (),
    ) -> None:
        """Load the policy in `folder` into `stages`; embedding and head stay on `device`.

        `layers`: the number of layers of each stage; empty: equal numbers. Raises `UserError`.
        """
        self._stages, self._device, self._dtype = stages, device, dtype
        self._model = describe(read_supported_config(folder))
        count = len(self._model.layers)
        try:
            self._spans = split_layers(count, len(stages), layers)
        except ValueError as error:
            raise UserError(f"{error}; change stage_layers") from error
        self._load(folder, policy)
        self._free = list(range(slots or SLOTS))[::-1]
        self._waiting: dict[int, Request] = {}
        self._live: dict[int, _Row] = {}
        self._kept: dict[int, _Row] = {}
        self.capabilities = Capabilities(
            name="native",
            version=__version__,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            vocabulary_size=self._model.vocabulary_size,
            hidden_size=self._model.hidden_size,
            length_max=self._model.length_max,
            slots=len(self._free),
        )

    def submit(self, request: Request) -> None:
        if request.id in self._waiting or request.id in self._live or request.id in self._kept:
            raise ValueError(f"request {request.id} is already in use")
        self.capabilities.check_request(request)
        self._waiting[request.id] = request

    def cancel(self, id: int) -> None:
        self._waiting.pop(id, None)
        for rows in (self._live, self._kept):
            row = rows.pop(id, None)
            if row is not None:
                self._free.append(row.slot)

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        going = list(self._live.values())
        new = self._admit()
        for part in _passes(new):
            self._advance(part)
        if going:
            self._advance(going)
        self._sample([*going, *new])
        finished = [self._piece(row) for row in (*going, *new) if _ended(row)]
        for piece in finished:
            row = self._live.pop(piece.id)
            if row.request.keep:
                self._kept[piece.id] = row
            else:
                self._free.append(row.slot)
        return finished

    @torch.no_grad()
    def prefill(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
    ) -> Prefill:
        self.capabilities.check_prefill(sequences, sampled)
        result = Prefill([], [], [])
        for tokens, indices in zip(sequences, sampled, strict=True):
            checkpoint()
            inputs = list(tokens[:-1])  # the last token predicts nothing
            hidden = self._forward(Work([len(inputs)], [0], []), [inputs])[0]
            rows = hidden[torch.tensor(list(indices), device=self._device) - 1]
            first = indices[0] - 1
            before = hidden[max(0, first - PROMPT_ROWS_MAX) : first]
            result.states.append(rows)
            result.hidden.append(rows.to(torch.bfloat16))
            result.prompt_hidden.append(before.to(torch.bfloat16))
        return result

    def logits(self, states: Tensor) -> Tensor:
        return self._embedding_and_head.logits(states)

    def load_weights(self, folder: Path, policy: int) -> None:
        if self._live or self._waiting:
            raise ValueError("requests are being generated; cancel or finish them first")
        check_same(self._model, folder)
        for id in list(self._kept):
            self.cancel(id)
        self._load(folder, policy)

    def close(self) -> None:
        """Let the stages go."""
        for stage in self._stages:
            stage.close()

    # --- weights -----------------------------------------------------------------------------

    def _load(self, folder: Path, policy: int) -> None:
        """Load a policy everywhere, after checking that all of it fits."""
        config = read_supported_config(folder)
        check_shapes(self._model, folder)
        ends = StoredTensors(folder, lambda name: not name.startswith("model.layers."), self._dtype)
        self._embedding_and_head = EmbeddingAndHead(
            Weights(self._model, dict(ends), str(folder), self._device, self._dtype)
        )
        for stage, span in zip(self._stages, self._spans, strict=True):
            own = tuple(f"model.layers.{index}." for index in span)
            tensors = StoredTensors(folder, _begins(own), self._dtype)
            stage.load(config, span, self._dtype, tensors)
        self._policy = policy

    # --- generating --------------------------------------------------------------------------

    def _admit(self) -> list[_Row]:
        """Give waiting requests free slots."""
        new = []
        for request in list(self._waiting.values()):
            row = self._continued(request)
            if row is None:
                if not self._free and self._kept:
                    self.cancel(next(iter(self._kept)))  # its episode will be computed again
                if not self._free:
                    break
                row = _Row(request, self._free.pop())
            row.feed = list(request.tokens[row.cached :])
            del self._waiting[request.id]
            self._live[request.id] = row
            new.append(row)
        return new

    def _continued(self, request: Request) -> _Row | None:
        """The kept row that this request continues; None if there is none that fits."""
        kept = self._kept.pop(request.continues, None) if request.continues is not None else None
        if kept is None:
            return None
        held = [*kept.request.tokens, *kept.tokens][: kept.cached]
        if len(held) >= len(request.tokens) or list(request.tokens[: len(held)]) != held:
            self._free.append(kept.slot)
            return None
        states = [kept.before, *(state[None] for state in kept.hidden)]
        before = torch.cat([state for state in states if state is not None])
        return _Row(request, kept.slot, cached=kept.cached, before=before[-PROMPT_ROWS_MAX:])

    def _advance(self, rows: list[_Row]) -> None:
        """Feed each row's tokens; its last state joins `hidden`."""
        work = Work(
            [len(row.feed) for row in rows],
            [row.cached for row in rows],
            [row.slot for row in rows],
        )
        hidden = self._forward(work, [row.feed for row in rows])
        for index, row in enumerate(rows):
            states = hidden[index, : len(row.feed)].to(torch.bfloat16)
            if not row.hidden:
                earlier = [row.before] if row.before is not None else []
                row.before = torch.cat([*earlier, states[:-1]])[-PROMPT_ROWS_MAX:].clone()
            row.cached += len(row.feed)
            row.feed = []
            row.hidden.append(states[-1].clone())
            row.last = hidden[index, len(states) - 1]

    def _forward(self, work: Work, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Final-norm hidden states [B, S, hidden]."""
        longest = max(work.lengths)
        padded = [[*row, *[0] * (longest - len(row))] for row in tokens]
        stream = self._embedding_and_head.embed(torch.tensor(padded, device=self._device))
        for stage in self._stages:
            stream = stage.run(work, stream)
        return self._embedding_and_head.finish(stream.to(self._device))

    def _sample(self, rows: list[_Row]) -> None:
        """Sample each row's next token."""
        some = max(1, ENTRIES_MAX // self._model.vocabulary_size)
        for start in range(0, len(rows), some):
            part = rows[start : start + some]
            temperatures = [row.request.temperature for row in part]
            logits = self.logits(torch.stack([row.last for row in part]))
            for row, (token, value) in zip(part, draw(part, temperatures, logits), strict=True):
                row.tokens.append(token)
                row.feed = [token]
                row.log_probabilities.append(value)
                row.position += 1

    def _piece(self, row: _Row) -> Piece:
        assert row.before is not None
        return Piece(
            id=row.request.id,
            tokens=list(row.tokens),
            hidden=torch.stack(row.hidden),
            log_probabilities=torch.tensor(row.log_probabilities),
            prompt_hidden=row.before,
            finish="stop" if row.tokens[-1] in row.request.stop_ids else "length",
            spans=[(self._policy, len(row.tokens))],
        )


def _ended(row: _Row) -> bool:
    last = row.tokens[-1] in row.request.stop_ids
    return last or row.position == row.request.limit


def _passes(rows: list[_Row]) -> list[list[_Row]]:
    """New rows in passes of at most `PREFILL_TOKENS_MAX` padded tokens, at least a row each."""
    passes: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: len(row.feed)):  # the last of a pass is its longest
        if passes and (len(passes[-1]) + 1) * len(row.feed) <= PREFILL_TOKENS_MAX:
            passes[-1].append(row)
        else:
            passes.append([row])
    return passes


def _begins(beginnings: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda name: name.startswith(beginnings)
