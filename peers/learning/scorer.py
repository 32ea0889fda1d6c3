"""The log-probabilities of a batch's completion tokens under a transformers model."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single_autograd as all_gather
from torch.utils.checkpoint import checkpoint

from peers.engines.config import first_line
from peers.engines.loading import Head, body_of, caps_scores
from peers.learning.attention import attention_arguments, windows_of
from peers.learning.batch import Batch
from peers.learning.packing import Layout, Rows, lay_out
from peers.learning.sequence_parallel import ARGUMENT, NAME, SharedRows, share
from swarm.errors import UserError

LOGITS_MAX = {"cpu": 1 << 25, "cuda": 1 << 28}
"""Logits held at once, fp32 (128 MiB, 1 GiB), by device: the head takes more tokens in pieces.
Small ones do not fill a GPU, and in 16 bits each rounds the head's gradient once."""

CHECK_LENGTHS = (24, 13, 9)
"""Tokens of the random sequences of `Scorer.find_layout`."""

APART_MAX = {False: 1e-4, True: 2e-2}
"""Largest share of hidden states that two layouts may differ by, in 32 and in 16 bits."""


class Scorer(torch.nn.Module):
    """Computes a model's log-probabilities and entropies of the completion tokens of `Rows`.

    A module, so that sharding and compilation wrap the pass. The head sees completions only."""

    def __init__(self, model: Any) -> None:
        """Raises `UserError` for a model whose attention this would compute wrongly."""
        super().__init__()
        if caps_scores(model.config) and model.config._attn_implementation == "sdpa":
            raise UserError("attention sdpa cannot cap scores as this model does; choose eager")
        self.logits_max: int | None = None
        """Logits held at once; None: `LOGITS_MAX` of the device."""
        self._windows = windows_of(model.config)
        self.packs = bool(self._windows)
        """Whether packed rows give what each sequence gives alone; see `find_layout`."""
        self.model = model
        output = model.get_output_embeddings()
        output.forward = functools.partial(_product, output)
        self._head = (Head(model),)  # in a tuple, so that it is no part of this module
        self._kernel: str = model.config._attn_implementation
        self._group: Any = None

    def share_tokens(self, group: Any) -> None:
        """From here on score every sequence together with a group's ranks, if there is one."""
        self._group = group
        if group is not None:
            self.model.set_attn_implementation(NAME)

    def place(self, rows: Rows, device: torch.device) -> Rows:
        """A pass, or this rank's share of its tokens, on a device."""
        if self._group is not None:
            rows = share(rows, self._group.rank(), self._group.size())
        return rows.to(device)

    @torch.no_grad()
    def find_layout(self, device: torch.device, *, half_precision: bool, group: Any = None) -> None:
        """Set `packs` by passes over random tokens, and share tokens with `group`, if there is one.

        Recurrent layers, for example, carry their state on from one packed sequence to the next.
        Raises `UserError` for a model that computes a padded sequence otherwise than it alone."""
        if self.packs and group is None:
            return
        parts = [_random_batch(self.model.config, [length]) for length in CHECK_LENGTHS]
        together = _random_batch(self.model.config, CHECK_LENGTHS)
        try:
            for rows in lay_out(parts[0], "padded"):
                self(rows.to(device))
            alone = torch.cat([self._all_states(each, "padded", device) for each in parts])
            if group is not None:
                self._check_sharing(group)
            self.share_tokens(group)
            padded, packed = (
                float((self._all_states(together, layout, device) - alone).norm() / alone.norm())
                for layout in ("padded", "flat")
            )
        except UserError:
            raise
        except Exception as error:  # whatever a family of transformers raises
            raise self._refused(first_line(error)) from error
        most = APART_MAX[half_precision]
        if not padded <= most:
            raise self._refused(
                "they compute a sequence beside a longer one otherwise than alone, by "
                f"{padded:.2g} of its hidden states; at most {most:g}"
            )
        # 16 bits hide what a convolution takes over from the last few tokens.
        blurred = half_precision and self._convolves
        # Chunks of attention are counted from a row's start, and longer than these sequences.
        chunked = getattr(self.model.config.get_text_config(), "attention_chunk_size", None)
        self.packs = packed <= most and not blurred and not chunked

    def _check_sharing(self, group: Any) -> None:
        """Raise `UserError` for what a check of so few tokens might not show."""
        self._group = group
        # Flash attention, too, is told windows and makes no other masks.
        if not self.model._supports_flash_attn or not self.model._can_set_attn_implementation():
            raise self._refused("their attention has masks of its own")
        if self._convolves:
            raise self._refused("they have convolutions over the tokens")

    @property
    def _convolves(self) -> bool:
        return any(isinstance(module, torch.nn.Conv1d) for module in self.model.modules())

    def _refused(self, why: str) -> UserError:
        how = "here" if self._group is None else "with trainer.sequence_parallel, so omit it"
        return UserError(
            f"models of the family {self.model.config.model_type} cannot be trained {how} ({why})"
        )

    def _all_states(self, batch: Batch, layout: Layout, device: torch.device) -> Tensor:
        """Final hidden states that predict a batch's completion tokens, [n, hidden]."""
        size = self.model.config.get_text_config().hidden_size
        found = torch.empty(batch.token_count(), size, device=device)
        for rows in lay_out(batch, layout):
            rows = self.place(rows, device)
            found[rows.index] = self(rows, states=True)[0].float()
        return found

    def forward(
        self,
        rows: Rows,
        entropy: bool = True,
        entropy_gradient: bool = False,
        largest_logit: bool = False,
        states: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of the batch's tokens `rows.index`, fp32 [k] each.

        log_softmax(logits / temperature) in fp32, at the rows' temperature. The entropy, in nats,
        is 0 unless `entropy`; it has a gradient only with `entropy_gradient`. With `largest_logit`
        the second value is the largest logit instead, with its gradient. With `states` the first is
        the final hidden states that predict the tokens, [k, hidden]."""
        if rows.whole is None:
            arguments = attention_arguments(self._kernel, rows, self._windows)
        else:
            shared = SharedRows(rows.whole, self._kernel, self._group)
            arguments = {"position_ids": rows.positions, ARGUMENT: shared}
        hidden = body_of(self.model)(
            input_ids=rows.tokens, use_cache=False, **arguments
        ).last_hidden_state
        hidden = hidden.flatten(0, 1)[rows.predictor]
        if states:
            hidden = self._all(hidden, rows)
            return hidden[rows.source], hidden
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        size = max(1, (self.logits_max or LOGITS_MAX[hidden.device.type]) // vocabulary)
        how = _How(rows.temperature, entropy, entropy_gradient, largest_logit)
        score = functools.partial(_score, self._head[0], how)
        if len(hidden) > size and torch.is_grad_enabled():
            # The backward pass keeps only hidden states, and computes the logits again.
            score = functools.partial(checkpoint, score, use_reentrant=False)
        parts = zip(torch.split(hidden, size), torch.split(rows.target, size), strict=True)
        pieces = [score(part, target) for part, target in parts]
        found = zip(*pieces, strict=True)
        log_pi, entropies = (self._all(torch.cat(values), rows) for values in found)
        return log_pi[rows.source], entropies[rows.source]

    def _all(self, values: Tensor, rows: Rows) -> Tensor:
        """The results of all ranks of a pass; backward sums, as each computes the loss of all."""
        return values if rows.whole is None else all_gather(values.contiguous(), 0, self._group)


def _random_batch(config: Any, lengths: Sequence[int]) -> Batch:
    """Sequences of random tokens, of which all but the first are scored."""
    rows = []
    for length in lengths:
        chance = torch.Generator().manual_seed(length)
        rows.append(torch.randint(config.get_text_config().vocab_size, (length,), generator=chance))
    counts = torch.tensor(lengths)
    return Batch(
        tokens=torch.cat(rows),
        sampled=torch.cat([torch.arange(length) > 0 for length in lengths]),
        lengths=counts,
        completion_lengths=counts - 1,
        temperature=torch.ones(len(lengths), dtype=torch.float64),
    )


@dataclass(frozen=True)
class _How:
    """What a score is computed of, besides hidden states and the head."""

    temperature: float
    entropy: bool
    entropy_gradient: bool
    largest_logit: bool


def _score(head: Head, how: _How, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities of `target`, entropies), fp32 [m] each, from hidden states [m, hidden]."""
    logits = head(hidden)
    if how.temperature != 1:
        logits = logits / how.temperature
    log_all = torch.log_softmax(logits, dim=-1)
    log_pi = log_all.gather(-1, target[:, None])[:, 0]
    if how.largest_logit:
        return log_pi, logits.amax(dim=-1)
    if not how.entropy:
        return log_pi, torch.zeros_like(log_pi)
    with torch.set_grad_enabled(how.entropy_gradient and torch.is_grad_enabled()):
        return log_pi, -(log_all.exp() * log_all).sum(-1)


def _product(head: torch.nn.Linear, hidden: Tensor) -> Tensor:
    """What a model's head computes here: logits in fp32, before a family scales or caps them."""
    if hidden.dtype == torch.float32:
        return F.linear(hidden, head.weight, head.bias)
    flat: Tensor = _HalfHead.apply(hidden.flatten(0, -2), head.weight)  # type: ignore[no-untyped-call]
    logits = flat.view(*hidden.shape[:-1], -1)
    return logits if head.bias is None else logits + head.bias.float()


class _HalfHead(torch.autograd.Function):
    """fp32 logits of a head and hidden states in 16 bits; the backward pass computes in 16 bits.

    Products of two 16-bit numbers are exact in fp32 and their sums stay in fp32, as in the engine.
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, head: Tensor) -> Tensor:
        context.save_for_backward(hidden, head)
        if hidden.is_cuda:
            return torch.mm(hidden, head.t(), out_dtype=torch.float32)
        return F.linear(hidden.float(), head.float())

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        hidden, head = context.saved_tensors
        gradient = gradients[0].to(hidden.dtype)
        return gradient @ head, gradient.t() @ hidden
