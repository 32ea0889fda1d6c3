"""The general engine: transformers' own module for models that the native engine does not know.

Prompts of equal length are generated together, in batches that end when their last row ends. No row
is padded, so recurrent and linear-attention layers see what they would see alone. A check at the
start compares generation with one plain forward pass, and refuses a model with the figure."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peers.engines.cache import STATE_DTYPE
from peers.engines.config import first_line
from peers.engines.device import available_bytes
from peers.engines.engine import PROMPT_ROWS_MAX, Capabilities, Piece, Prefill, Request
from peers.engines.fitting import check_same, facts_of
from peers.engines.loading import TOLERANCES, Head, body_of, load_policy
from peers.engines.memory import position_bytes
from peers.engines.sampling import Ahead, OfRequest, draw
from swarm.errors import UserError
from swarm.version import __version__
from swarm.world.progress import checkpoint

SLOTS = 64
"""Most rows generated at once."""
PREFILL_TOKENS_MAX = 1 << 13
"""Tokens of one prefill pass; sequences of equal length share one."""
CHECK_TOKENS = 24
"""Random tokens of the check at the start."""


@dataclass(eq=False)
class _Row(OfRequest):
    request: Request
    position: int
    noise: Ahead | None = None
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    prompt_hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    over: bool = False


class GeneralEngine:
    """See `peers.engines.engine.Engine`."""

    def __init__(
        self,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        policy: int = 0,
        slots: int = 0,
        memory_share: float = 0.5,
    ) -> None:
        """As `NativeEngine`; `UserError` if the model is unknown, has code, or fails the check."""
        self._device, self._policy = torch.device(device), policy
        self._model = load_policy(folder, dtype).to(self._device).eval()
        self._dtype = next(self._model.parameters()).dtype
        self._config = config = self._model.config.get_text_config()
        self._facts = facts_of(folder)
        try:
            self._head = Head(self._model, _in_fp32)
        except AttributeError as error:
            raise self._unable(folder, error) from error
        self._slots, self._memory_share = slots or SLOTS, memory_share
        self._waiting: dict[int, Request] = {}
        self._batch: list[_Row] = []
        self._cache: Any = None
        self.capabilities = Capabilities(
            name="general",
            version=__version__,
            device=str(self._device),
            dtype=str(self._dtype).removeprefix("torch."),
            vocabulary_size=config.vocab_size,
            hidden_size=config.hidden_size,
            length_max=config.max_position_embeddings,
            slots=self._slots,
        )
        self._check(folder)

    # --- requests ----------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        if request.id in self._waiting or any(
            row.request.id == request.id and not row.over for row in self._batch
        ):
            raise ValueError(f"request {request.id} is already in use")
        self.capabilities.check_request(request)
        self._waiting[request.id] = request

    def cancel(self, id: int) -> None:
        self._waiting.pop(id, None)
        for row in self._batch:
            row.over = row.over or row.request.id == id

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        live = [row for row in self._batch if not row.over]
        if live:
            fed = [row.tokens[-1] if row.tokens else 0 for row in self._batch]
            states = self._forward(torch.tensor(fed, device=self._device)[:, None])[:, -1]
        else:
            self._batch, self._cache = [], None
            if not self._waiting:
                return []
            live, states = self._admit()
        at = [index for index, row in enumerate(self._batch) if not row.over]
        temperatures = [row.request.temperature for row in live]
        drawn = draw(live, temperatures, self.logits(states[at]))
        return self._append(live, states[at], drawn)

    def _admit(self) -> tuple[list[_Row], Tensor]:
        """Begin a batch of waiting requests whose prompts have one length."""
        length = len(next(iter(self._waiting.values())).tokens)
        alike = [each for each in self._waiting.values() if len(each.tokens) == length]
        alike = alike[: self._rows_max(length + max(each.limit - each.start for each in alike))]
        for each in alike:
            del self._waiting[each.id]
        self._batch = [_Row(each, each.start) for each in alike]
        self._cache = self._new_cache()
        hidden = self._forward(
            torch.tensor([list(each.tokens) for each in alike], device=self._device)
        )
        for row, states in zip(self._batch, hidden, strict=True):
            row.prompt_hidden = states[max(0, length - 1 - PROMPT_ROWS_MAX) : length - 1].to(
                STATE_DTYPE, copy=True
            )
        return list(self._batch), hidden[:, -1]

    def _rows_max(self, length: int) -> int:
        """Rows of a length whose caches fit into the memory for them."""
        own = self._config  # some families call these otherwise
        sizes = {"hidden_size": own.hidden_size, "num_hidden_layers": own.num_hidden_layers}
        config = {**own.to_dict(), **sizes}
        row = position_bytes(config, self._dtype) * length
        memory = int(self._memory_share * available_bytes(self._device))
        return max(1, min(self._slots, int(memory // row)))

    def _append(
        self, live: Sequence[_Row], states: Tensor, drawn: Sequence[tuple[int, float]]
    ) -> list[Piece]:
        finished = []
        kept = states.to(STATE_DTYPE, copy=True)
        for row, state, (token, log_probability) in zip(live, kept, drawn, strict=True):
            if log_probability != log_probability:
                raise UserError(
                    f"policy {self._policy} gives logits that are not numbers (row "
                    f"{row.request.row}, position {row.position}); its weights are broken"
                )
            row.tokens.append(token)
            row.log_probabilities.append(log_probability)
            row.hidden.append(state)
            row.position += 1
            row.over = token in row.request.stop_ids or row.position == row.request.limit
            if row.over:
                finished.append(self._piece(row))
        return finished

    def _piece(self, row: _Row) -> Piece:
        return Piece(
            id=row.request.id,
            tokens=row.tokens,
            hidden=torch.stack(row.hidden),
            log_probabilities=torch.tensor(row.log_probabilities),
            prompt_hidden=row.prompt_hidden,
            finish="stop" if row.tokens[-1] in row.request.stop_ids else "length",
            spans=[(self._policy, len(row.tokens))],
        )

    # --- the model ---------------------------------------------------------------------------

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._config)

    def _forward(self, tokens: Tensor) -> Tensor:
        """Final hidden states [rows, tokens, hidden] of the next tokens of the batch."""
        hidden: Tensor = body_of(self._model)(
            input_ids=tokens, past_key_values=self._cache, use_cache=True
        ).last_hidden_state
        return hidden

    @torch.no_grad()
    def prefill(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
    ) -> Prefill:
        """See `Engine.prefill`."""
        self.capabilities.check_prefill(sequences, sampled)
        body = body_of(self._model)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        while order:
            checkpoint()
            length = len(sequences[order[0]]) - 1
            some = max(1, PREFILL_TOKENS_MAX // max(1, length))
            part = [each for each in order[:some] if len(sequences[each]) - 1 == length]
            tokens = torch.tensor(
                [list(sequences[each][:-1]) for each in part], device=self._device
            )
            hidden = body(input_ids=tokens, use_cache=False).last_hidden_state
            for index, states in zip(part, hidden, strict=True):
                at = torch.tensor(sampled[index], device=self._device) - 1
                first = sampled[index][0] - 1
                before = states[max(0, first - PROMPT_ROWS_MAX) : first]
                found[index] = states[at], before.to(STATE_DTYPE)
            order = order[len(part) :]
        states = [found[index][0] for index in range(len(sequences))]
        return Prefill(
            [each.to(STATE_DTYPE) for each in states],
            states,
            [found[index][1] for index in range(len(sequences))],
        )

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """See `Engine.logits`."""
        return self._head(states.float())

    def load_weights(self, folder: Path, policy: int) -> None:
        """See `Engine.load_weights`. No request may be live."""
        check_same(self._facts, folder)
        loaded = load_policy(folder, self._dtype)
        known, given = self._model.state_dict(), loaded.state_dict()
        for name, value in known.items():
            if name not in given or given[name].shape != value.shape:
                raise UserError(
                    f"policy {policy} in {folder} does not fit: tensor {name} has shape "
                    f"{tuple(given[name].shape) if name in given else None}, not "
                    f"{tuple(value.shape)}"
                )
        self._model.load_state_dict(given)
        self._head = Head(self._model, _in_fp32)
        self._policy = policy

    def _unable(self, folder: Path, error: Exception) -> UserError:
        return UserError(
            f"model {folder}: its family, {self._config.model_type}, cannot generate here "
            f"({first_line(error)})"
        )

    @torch.inference_mode()
    def _check(self, folder: Path) -> None:
        """Compare generation, a token at a time, with one pass; raises `UserError`."""
        chance = torch.Generator().manual_seed(0)
        size = min(CHECK_TOKENS, self.capabilities.length_max)
        shape = (2, size)
        tokens = torch.randint(0, self.capabilities.vocabulary_size, shape, generator=chance)
        tokens = tokens.to(self._device)
        try:
            plain = self._model(input_ids=tokens, use_cache=False).logits.float()
            self._cache = self._new_cache()
            first = self._forward(tokens[:, : size // 2])
            rest = [self._forward(tokens[:, at : at + 1]) for at in range(size // 2, size)]
            own = torch.stack([self.logits(each) for each in torch.cat((first, *rest), dim=1)])
            if own.shape != plain.shape:
                raise ValueError(f"{own.shape[1]} states for {plain.shape[1]} tokens")
        except Exception as error:  # whatever a family of transformers raises
            raise self._unable(folder, error) from error
        finally:
            self._cache = None
        if plain.isnan().any():
            raise UserError(
                f"model {folder} gives logits that are not numbers; its weights are broken"
            )
        likely = plain.log_softmax(-1)
        apart = (likely.exp() * (own.log_softmax(-1) - likely).abs()).sum(-1).mean().item()
        if not apart <= TOLERANCES[self._dtype]:
            raise UserError(
                f"model {folder}: its family, {self._config.model_type}, generates other tokens "
                f"one by one than in one pass (by {apart:.2g} nats; at most "
                f"{TOLERANCES[self._dtype]:g}), so it cannot be checked"
            )


def _in_fp32(head: nn.Module) -> nn.Module:
    """A copy that computes in fp32, whatever the model computes in."""
    return copy.deepcopy(head).float()
