"""An engine's answers to plain requests: the likelihood of texts, and greedy or sampled text.

What lm-eval asks of a model, without lm-eval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from peers.engines.engine import Engine, Request
from peers.environments import Renderer
from swarm.rollouts.seeds import digest, noise_key
from swarm.world.progress import checkpoint

AT_ONCE = 64
"""Most texts in a batch."""

LOGITS_BYTES_MAX = 256 << 20
"""Most bytes of logits at a time: of long texts over a large vocabulary they would take GBs."""

CHUNK = 32
"""Tokens between two looks for a stop text, which no engine knows."""


@dataclass(frozen=True)
class Scored:
    """A continuation's likelihood."""

    log_probability: float
    """Nats, of all its tokens together."""
    is_greedy: bool
    """Whether each token is the likeliest one."""


@torch.inference_mode()
def score(engine: Engine, context: Sequence[int], continuation: Sequence[int]) -> Scored:
    """The likelihood of `continuation` after `context`, each of at least one token.

    Of a sequence that is too long, the oldest tokens are left out.
    """
    length_max = engine.capabilities.length_max
    scored = list(continuation)[-(length_max - 1) :]
    tokens = [*context, *scored][-length_max:]
    indices = range(len(tokens) - len(scored), len(tokens))
    states = engine.prefill([tokens], [list(indices)]).states[0]
    rows_at_once = max(1, LOGITS_BYTES_MAX // (4 * engine.capabilities.vocabulary_size))
    total, is_greedy = 0.0, True
    for start in range(0, len(scored), rows_at_once):
        logits = engine.logits(states[start : start + rows_at_once])
        wanted = torch.tensor(scored[start : start + rows_at_once], device=logits.device)
        chosen = torch.log_softmax(logits, -1).gather(-1, wanted[:, None])
        total += float(chosen.double().sum())
        is_greedy = is_greedy and bool((logits.argmax(-1) == wanted).all())
    return Scored(total, is_greedy)


@dataclass
class Continuation:
    """A text to generate."""

    prompt: list[int]
    stop_texts: Sequence[str]
    limit: int
    """Most tokens."""
    temperature: float = 0.0
    """0: the likeliest token."""
    row: int = 0
    """Chooses the noise."""
    tokens: list[int] = field(default_factory=list)

    def fit(self, length_max: int) -> None:
        """Shorten prompt and limit to the context length; the prompt keeps at least half of it."""
        self.limit = min(self.limit, max(length_max - len(self.prompt), length_max // 2))
        self.prompt = self.prompt[-(length_max - self.limit) :]


def generate(
    engine: Engine,
    renderer: Renderer,
    wanted: Sequence[Continuation],
    stop_ids: Sequence[int],
    on_end: Callable[[int, str], None],
) -> None:
    """Generate texts on an engine with no other requests; `on_end` gets each with its index.

    A text ends before the first of its stop texts, at a stop token, or at its limit.
    """
    ids = count()
    waiting = list(reversed(range(len(wanted))))
    going: dict[int, int] = {}
    """By request."""
    last: dict[int, int] = {}
    """Last request of each text, whose cache is kept."""
    key = noise_key(digest("swarm/1/lm-eval"))

    def ask(index: int) -> None:
        each, id = wanted[index], next(ids)
        each.fit(engine.capabilities.length_max)
        request = Request(
            id=id,
            tokens=[*each.prompt, *each.tokens],
            row=each.row,
            noise_key=key if each.temperature else None,
            temperature=each.temperature or 1.0,
            stop_ids=tuple(stop_ids),
            limit=min(each.limit, len(each.tokens) + CHUNK),
            start=len(each.tokens),
            continues=last.get(index),
            keep=True,
        )
        engine.submit(request)
        going[id], last[index] = index, id

    while waiting or going:
        checkpoint()
        while waiting and len(going) < AT_ONCE:
            ask(waiting.pop())
        for piece in engine.step():
            index = going.pop(piece.id)
            each = wanted[index]
            each.tokens += piece.tokens
            text, finished = renderer.decode_completion(each.tokens, stop_ids)
            cut = _cut(text, each.stop_texts)
            if cut is None and not finished and len(each.tokens) < each.limit:
                ask(index)
                continue
            engine.cancel(last.pop(index))
            on_end(index, text if cut is None else cut)


def _cut(text: str, stops: Sequence[str]) -> str | None:
    """The text before the first stop text; None if there is none in it."""
    ends = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else None
