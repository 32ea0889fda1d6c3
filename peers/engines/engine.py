"""The interface of every engine, to generate and to prefill: token ids go in and come out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from swarm.rollouts.rollout import Finish

PROMPT_ROWS_MAX = 128
"""Hidden rows kept before a completion: a proof chunk needs 128 values, a row has at least 1."""


class Mask(Protocol):
    """Which tokens a segment may have, as a grammar that it must follow."""

    def allowed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Ids of the tokens that may follow, at least one, after all `tokens` of the request and
        of its segment. Called with ever longer lists."""
        ...


@dataclass(frozen=True)
class Request:
    """One model segment to generate."""

    id: int
    """Chosen by the caller; no two requests that an engine holds share it."""
    tokens: Sequence[int]
    """The prompt, or a whole unfinished episode."""
    row: int
    """The row in its submission (group · G + sample)."""
    noise_key: tuple[int, int] | None
    """With the row it makes the noise (`peers.engines.noise`); None: the likeliest is taken."""
    temperature: float
    stop_ids: tuple[int, ...]
    limit: int
    """Model tokens of the whole episode."""
    start: int = 0
    """Model tokens sampled in the episode before this request."""
    continues: int | None = None
    """A finished request whose kept cache holds a prefix of `tokens`."""
    keep: bool = False
    """Keep the cache for the episode's next turn, until a request continues it or `cancel` releases
    it. It may be dropped when memory is short; the episode is then computed again."""
    mask: Mask | None = None
    """Forbids tokens: then no validator would accept the segment, whose noise might have chosen
    another. Only for an engine whose capability `masks` is true."""


@dataclass
class Piece:
    """A finished model segment; n = its tokens, stop token included."""

    id: int
    """The request's."""
    tokens: list[int]
    hidden: Tensor
    """bf16 [n, hidden]: row i is the final-norm hidden state from which token i was sampled."""
    log_probabilities: Tensor
    """fp32 [n]: log_softmax(logits / T) of the sampled token, without noise."""
    prompt_hidden: Tensor
    """bf16 [at most 128, hidden]: the rows just before `hidden`, oldest first. They exclude the
    last position of the request's tokens, which is row 0 of `hidden`."""
    finish: Finish
    spans: list[tuple[int, int]]
    """(policy, tokens) in order: the policies that the tokens were sampled from."""
    swap_hidden: list[Tensor] = field(default_factory=list)
    """Per span but the first, its `prompt_hidden`: the rows just before its first row, computed
    with its own policy. Empty tensors where the model's rows have 128 values and none is needed."""


@dataclass
class Prefill:
    """The same hidden states, recomputed from given tokens in one pass; n = sampled tokens."""

    hidden: list[Tensor]
    states: list[Tensor]
    """[n, hidden]: `hidden` in the precision it was computed in. `Engine.logits` turns some rows
    at a time into logits, because the logits of a whole batch may take gigabytes."""
    prompt_hidden: list[Tensor]


@dataclass(frozen=True)
class Capabilities:
    """What an engine is and can do."""

    name: str
    version: str
    device: str
    dtype: str
    vocabulary_size: int
    hidden_size: int
    length_max: int
    """The model's context length: all tokens of an episode, the prompt included."""
    slots: int | None = None
    """Most requests generated at once; None: unknown."""
    memory_bytes: int | None = None
    """Memory for weights and caches; None: unknown."""
    in_flight: bool = False
    """Whether `load_weights` may be called while requests are being generated. Each row after it is
    what a prefill with the new policy gives: nothing computed with the old one is kept."""
    masks: bool = False
    """Whether requests may have a `mask`."""

    @property
    def engine_class(self) -> str:
        """What honest rounding may depend on, for the header: `vllm 0.32.0 bfloat16 cuda`."""
        kind = self.device.partition(":")[0]
        return f"{self.name} {self.version} {self.dtype} {kind}"

    def check_request(self, request: Request) -> None:
        """Raise `ValueError` for a request that no engine with this model can serve."""
        if request.stop_ids:
            self._check_tokens(request.stop_ids, length=0)
        if not 0 <= request.start < request.limit:
            raise ValueError(f"no position from {request.start} is below the limit {request.limit}")
        if not 0 < request.temperature < math.inf:
            raise ValueError(
                f"the temperature is {request.temperature:g}; it must be above 0 and finite "
                "(without a noise_key the likeliest token is taken)"
            )
        self._check_tokens(request.tokens, len(request.tokens) + request.limit - request.start)

    def check_prefill(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
    ) -> None:
        """Raise `ValueError` for arguments of `Engine.prefill` that no engine can serve."""
        if len(sampled) != len(sequences):
            raise ValueError(f"{len(sampled)} lists of indices for {len(sequences)} sequences")
        for tokens, indices in zip(sequences, sampled, strict=True):
            self._check_tokens(tokens, len(tokens))
            if not indices or indices[0] < 1 or indices[-1] != len(tokens) - 1:
                raise ValueError(
                    "sampled tokens must begin after the prompt and end at the last token"
                )

    def _check_tokens(self, tokens: Sequence[int], length: int) -> None:
        if not tokens:
            raise ValueError("a prompt has no token")
        if not 0 <= min(tokens) <= max(tokens) < self.vocabulary_size:
            raise ValueError(f"a token id lies outside the vocabulary of {self.vocabulary_size}")
        if length > self.length_max:
            raise ValueError(
                f"{length} positions are needed; the context length is {self.length_max}"
            )


class Engine(Protocol):
    """Generates with one policy at a time. Its methods are called from one thread at a time."""

    @property
    def capabilities(self) -> Capabilities: ...

    def submit(self, request: Request) -> None:
        """Queue a request. Its row gets the same tokens whatever else the engine generates.

        Raises `ValueError` for an empty prompt, an id outside the vocabulary or in use, a limit
        that leaves no token, a temperature not above 0, or more positions than the context."""

    def step(self) -> list[Piece]:
        """Advance all live requests by one or more tokens; return those that finished."""

    def cancel(self, id: int) -> None:
        """Drop a request and its kept cache; an unknown id is ignored."""

    def prefill(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
    ) -> Prefill:
        """Compute teacher-forced hidden states from which the sampled tokens were drawn.

        `sampled[i]` are the ascending indices of the sampled tokens in sequence i. They exclude
        index 0 and include the last index. Raises `ValueError` as `submit` does."""

    def logits(self, states: Tensor) -> Tensor:
        """fp32 logits [n, vocabulary] of some of a prefill's `states`, before the temperature."""

    def load_weights(self, folder: Path, policy: int) -> None:
        """Replace the weights by those of another checkpoint of the same model, number `policy`.

        Raises `UserError` when they do not fit; the engine then keeps the old weights."""
