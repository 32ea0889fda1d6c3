"""The general engine: transformers' own module for families that the native engine does not know.

Prompts of equal length are generated together, in batches that end when their last row ends. No
row is padded, so recurrent and linear-attention layers see what they would see alone. A check at
the start compares token-by-token generation with one plain forward pass; a model that fails it is
refused with the figure.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peers.engines.adapter_config import is_adapter
from peers.engines.architecture import LAYERS_MAX, SIZE_MAX
from peers.engines.cache import STATE_DTYPE
from peers.engines.config import read_config
from peers.engines.device import available_bytes
from peers.engines.engine import PROMPT_ROWS_MAX, Capabilities, Piece, Prefill, Request
from peers.engines.model import STORED, open_weights
from peers.engines.noise import Ahead, OfRequest, draw
from swarm.errors import UserError
from swarm.terminal.figures import readable_bytes
from swarm.version import __version__
from swarm.world.progress import checkpoint

SLOTS = 64
"""Most rows generated at once."""
PREFILL_TOKENS_MAX = 1 << 13
"""Tokens of one prefill pass; sequences of equal length share one."""
CHECK_TOKENS = 24
"""Random tokens of the check at the start."""
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest mean difference, in nats, between a token's log-probability in both ways. A wrong
attention mask or position changes it by several nats; rounding in 16 bits by some hundredths."""


@dataclass(eq=False)
class _Row(OfRequest):
    """A request being generated."""

    request: Request
    position: int
    noise: Ahead | None = None
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    prompt_hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    over: bool = False


class _Output:
    """What a body returns: its states, and None for all else that a family may look for."""

    def __init__(self, states: Tensor | None) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands in for a model's body and returns hidden states that were computed before."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self._body = (body,)
        """In a tuple, so that it is no part of this module."""
        self.states: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """What the model reads of its body: multipliers of its head, for example."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._body[0], name)

    def forward(self, *_arguments: Any, **_named: Any) -> Any:
        return _Output(self.states)


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
        """Load the policy in `folder`, whose number is `policy`, and check it.

        Arguments are as `NativeEngine`'s. Raises `UserError` for a model that transformers does not
        know, whose code lies in its folder, or that fails the check.
        """
        self._device, self._policy = torch.device(device), policy
        self._model = load(folder, dtype).to(self._device).eval()
        self._dtype = next(self._model.parameters()).dtype
        self._config = config = self._model.config.get_text_config()
        try:
            self._head, self._given = _head_of(self._model)
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
        config = self._config
        try:
            heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            width = getattr(config, "head_dim", None)
            across = int(heads * (width or config.hidden_size // config.num_attention_heads))
        except Exception:  # the family has none, or others in each layer
            across = config.hidden_size
        row = 2 * config.num_hidden_layers * max(1, across) * self._dtype.itemsize * length
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
        hidden: Tensor = _body_of(self._model)(
            input_ids=tokens, past_key_values=self._cache, use_cache=True
        ).last_hidden_state
        return hidden

    @torch.no_grad()
    def prefill(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
    ) -> Prefill:
        """See `Engine.prefill`."""
        self.capabilities.check_prefill(sequences, sampled)
        body = _body_of(self._model)
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
        self._given.states = states[None].to(next(self._head.parameters()).dtype)
        blank = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        found: Tensor = self._head(input_ids=blank, use_cache=False).logits[0].float()
        self._given.states = None
        return found

    def load_weights(self, folder: Path, policy: int) -> None:
        """See `Engine.load_weights`. No request may be live."""
        loaded = load(folder, self._dtype)
        kept, now = self._model.config.to_dict(), loaded.config.to_dict()
        changed = sorted(name for name in kept.keys() | now.keys() if _differs(name, kept, now))
        if changed:
            raise UserError(
                f"{folder} holds another model than the one loaded: {changed[0]} differs"
            )
        known, given = self._model.state_dict(), loaded.state_dict()
        for name, value in known.items():
            if name not in given or given[name].shape != value.shape:
                raise UserError(
                    f"policy {policy} in {folder} does not fit: tensor {name} has shape "
                    f"{tuple(given[name].shape) if name in given else None}, not "
                    f"{tuple(value.shape)}"
                )
        self._model.load_state_dict(given)
        self._head, self._given = _head_of(self._model)
        self._policy = policy

    def _unable(self, folder: Path, error: Exception) -> UserError:
        return UserError(
            f"model {folder}: its family, {self._config.model_type}, cannot generate here "
            f"({_first_line(error)}); use vLLM for it"
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
                f"{TOLERANCES[self._dtype]:g}), so it cannot be checked; use vLLM for it"
            )


def load(folder: Path, dtype: torch.dtype | None) -> Any:
    """The transformers model in a folder; `dtype` None: as stored.

    Runs no code from the folder and never uses the network. Raises `UserError`, also for a model
    that lacks tensors, because transformers would make them up.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    _refuse_variants(folder)
    open_weights(folder, stored=STORED | {"I64"})  # some families hold tables of indices
    how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **how)
        _check_sizes(config.get_text_config(), folder)
        with torch.device("meta"):
            shapes: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype or config.dtype or torch.float32
            )
        _check_room(shapes, folder)
        model, said = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True, **how
        )
    except UserError:
        raise
    except Exception as error:  # a config's values reach all of transformers
        raise UserError(
            f"model {folder} cannot be loaded by transformers ({_first_line(error)})"
        ) from error
    missing = sorted(said["missing_keys"])
    if missing:
        raise UserError(
            f"the weights in {folder} lack {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + ", which a model with this config.json has; get the whole model again"
        )
    if model.dtype not in TOLERANCES:
        raise UserError(
            f"model {folder} is stored as {str(model.dtype).removeprefix('torch.')}; set dtype to "
            "float32, bfloat16 or float16"
        )
    return model


_SAID_ONLY = frozenset(
    (
        *("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
)
"""Fields of a config that change nothing about what a loaded model computes."""


def _differs(name: str, kept: dict[str, Any], now: dict[str, Any]) -> bool:
    return name not in _SAID_ONLY and kept.get(name) != now.get(name)


def _refuse_variants(folder: Path) -> None:
    """Raise `UserError` for a folder that asks for programs, quantisation or an adapter."""
    config = read_config(folder)
    inner: list[Any] = [config]
    while inner:
        found = inner.pop()
        if isinstance(found, list):
            inner += found
        elif isinstance(found, dict):
            inner += found.values()
            # An implementation OWNER/NAME is one that the package kernels would fetch and run.
            programs = [
                name
                for name, value in found.items()
                if name == "auto_map" or ("_implementation" in name and "/" in str(value))
            ]
            if programs:
                raise UserError(
                    f"model {folder} brings its own programs ({programs[0][:100]}), which are "
                    "never run; use a family that transformers has"
                )
    if config.get("quantization_config") is not None:
        raise UserError(
            f"model {folder} is quantised (quantization_config), which is refused, because "
            "validators compute with the trainer's own weights; use the model that is not"
        )
    if is_adapter(folder):
        raise UserError(
            f"{folder} holds an adapter of a family that only the general engine knows; merge it "
            "into its base first"
        )


def _check_sizes(config: Any, folder: Path) -> None:
    """Raise `UserError` for a config whose sizes the engine cannot work with."""
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        size = getattr(config, name, None)
        most = LAYERS_MAX if name == "num_hidden_layers" else SIZE_MAX
        if type(size) is not int or not 1 <= size <= most:
            raise UserError(
                f"model config {folder / 'config.json'}: {name} is {size!r:.100}; it must be a "
                f"whole number from 1 to {most}"
            )


def _check_room(model: Any, folder: Path) -> None:
    """Raise `UserError` for a model (without weights) that is larger than the free memory."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    needed = sum(each.numel() * each.element_size() for each in tensors.values())
    free = available_bytes(torch.device("cpu"))
    if needed > free:
        raise UserError(
            f"model {folder} takes {readable_bytes(needed)} of memory, and {readable_bytes(free)} "
            "are free; choose a smaller model, or a larger machine"
        )


def _first_line(error: Exception) -> str:
    """What an error says, for a sentence."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines[:2])[:200]}" if lines else type(error).__name__


def _body_of(model: Any) -> Any:
    """All of a model but its head."""
    return getattr(model, model.base_model_prefix)


def _head_of(model: Any) -> tuple[Any, _Given]:
    """The model with its body replaced by `_Given`, and with a head in fp32."""
    given = _Given(_body_of(model))
    head = copy.copy(model)
    head._modules = dict(model._modules)
    head._modules[model.base_model_prefix] = given
    for name, module in model._modules.items():
        if module is model.get_output_embeddings() and module is not None:
            head._modules[name] = copy.deepcopy(module).float()
    return head, given
