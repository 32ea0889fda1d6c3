"""Sequence parallelism: neighbouring ranks share the tokens of every sequence.

All of a model but its attention computes each token by itself, so that a rank needs its own share
only. Around attention the ranks exchange tokens for heads, all to all: each attends with some of
the heads, over all tokens (DeepSpeed-Ulysses, arXiv 2309.14509, §3). Token t of a row belongs to
rank t mod N, not to the rank of its block: prompts and completions, and so the head's logits, are
then shared evenly, too."""

import copy
import math
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all
from transformers import AttentionInterface

from peers.learning.attention import kernel_arguments
from peers.learning.packing import Rows

NAME = "sequence-parallel"
"""Name under which transformers finds `_attend`. It knows no mask for it, and so makes none."""

ARGUMENT = "shared_rows"
"""Name of the argument by which a model hands `SharedRows` on to its layers' attention."""


def share(rows: Rows, rank: int, ranks: int) -> Rows:
    """One rank's share of a pass: every so-many-th token of its rows, padded to equal lengths.

    Every rank computes equally many results, some of them for nothing; `source` points into the
    results of all ranks, one rank's after another's."""
    width = rows.tokens.shape[1]
    missing = -width % ranks
    ends = rows.starts.new_tensor([width + missing] if missing else [])
    whole = replace(
        rows,
        tokens=F.pad(rows.tokens, (0, missing)),
        positions=F.pad(rows.positions, (0, missing)),
        sequence=F.pad(rows.sequence, (0, missing), value=-1),
        # For a kernel that leaves out what belongs to no sequence.
        starts=torch.cat([rows.starts, ends]),
        longest=max(rows.longest, missing),
    )
    row, column = rows.predictor // width, rows.predictor % width
    owner, here = column % ranks, row * ((width + missing) // ranks) + column // ranks
    most = max(1, int(torch.bincount(owner).max()) if len(owner) else 0)
    place = torch.empty_like(owner)
    predictor, target = here.new_zeros(most), rows.target.new_zeros(most)
    for each in range(ranks):
        mine = (owner == each).nonzero()[:, 0]
        place[mine] = each * most + torch.arange(len(mine))
        if each == rank:
            predictor[: len(mine)], target[: len(mine)] = here[mine], rows.target[mine]
    return replace(
        rows,
        tokens=whole.tokens[:, rank::ranks],
        positions=whole.positions[:, rank::ranks],
        predictor=predictor,
        target=target,
        source=place[rows.source],
        whole=whole,
    )


class SharedRows:
    """Rows whose tokens are shared, and attention over them."""

    def __init__(self, whole: Rows, kernel: str, group: Any) -> None:
        """`kernel`: the attention implementation, one of `attention.ATTENTIONS`."""
        self._whole, self._kernel, self._group = whole, kernel, group
        self._rank, self._ranks = group.rank(), group.size()
        self._arguments: dict[int | None, dict[str, Any]] = {}
        """Of the kernel, by window."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, named: dict[str, Any]
    ) -> Tensor:
        """Queries [R, H, s, D], keys and values [R, H_kv, s, D] of this rank → [R, s, H, D]."""
        heads, per = query.shape[1], query.shape[1] // key.shape[1]
        repeat = self._ranks // math.gcd(self._ranks, key.shape[1])
        if per % repeat:
            repeat = per  # the ranks' heads do not read equally many of them
        if repeat > 1:
            key, value = (each.repeat_interleave(repeat, 1) for each in (key, value))
        query, key, value = (self._to_heads(each) for each in (query, key, value))
        here = copy.copy(module)  # as it is with these heads alone
        here.num_key_value_groups = per // repeat
        if getattr(module, "sinks", None) is not None:  # one for each head
            sinks = module.sinks.tensor_split(self._ranks)[self._rank]
            vars(here)["sinks"] = named["s_aux"] = sinks
        window = named.get("sliding_window")
        if window not in self._arguments:
            self._arguments[window] = kernel_arguments(self._kernel, self._whole, window)
        family = sys.modules[type(module).__module__]
        eager = getattr(family, "eager_attention_forward", None)
        attend = family.ALL_ATTENTION_FUNCTIONS.get_interface(self._kernel, eager)
        found, _ = attend(here, query, key, value, **named, **self._arguments[window])
        return self._to_tokens(found, heads)

    def _sizes(self, heads: int) -> list[int]:
        """How many of so many heads each rank attends with."""
        return [len(each) for each in torch.arange(heads).tensor_split(self._ranks)]

    def _to_heads(self, states: Tensor) -> Tensor:
        """States [R, heads, s, D] of this rank's tokens → [R, h, S, D] of its heads."""
        sizes = self._sizes(states.shape[1])
        mine = sizes[self._rank]
        got = all_to_all(
            states.transpose(0, 1).contiguous(), [mine] * self._ranks, sizes, self._group
        )
        rows, tokens, size = got.shape[1:]
        parts = got.view(self._ranks, mine, rows, tokens, size)
        return parts.permute(2, 1, 3, 0, 4).flatten(2, 3)

    def _to_tokens(self, states: Tensor, heads: int) -> Tensor:
        """States [R, S, h, D] of this rank's heads → [R, s, heads, D] of its tokens."""
        rows, tokens, mine, size = states.shape
        parts = states.reshape(rows, tokens // self._ranks, self._ranks, mine, size)
        sent = parts.permute(2, 3, 0, 1, 4).flatten(0, 1)
        got = all_to_all(sent, self._sizes(heads), [mine] * self._ranks, self._group)
        return got.permute(1, 2, 0, 3)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **named: Any
) -> tuple[Tensor, None]:
    shared = named.pop(ARGUMENT, None)
    if shared is None:
        raise ValueError("their layers hand no arguments on to attention")
    if attention_mask is not None:
        raise ValueError("their attention has masks of its own")
    named.pop("position_ids", None)  # of this rank's tokens; kernels only guess sequences from them
    return shared.attend(module, query, key, value, named), None


AttentionInterface.register(NAME, _attend)
