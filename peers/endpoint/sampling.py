"""Sampling of one model segment, in parts, so that a client sees tokens as they are sampled.

An engine returns a request's tokens when the request is finished. A segment that is streamed, or
that may end at a text, is therefore generated in requests of a few tokens, each of which continues
the cache of the one before. Noise depends on a token's position only, so the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from peers.endpoint.driving import Driver
from peers.endpoint.text import Text
from peers.engines.engine import Piece, Request
from peers.engines.episodes import SpanStates, add_states
from swarm.rollouts.rollout import Finish, Span

PART_TOKENS = 8
"""Tokens per event of a stream, and between two looks for a stop text."""


@dataclass(frozen=True)
class Ask:
    """One model segment to sample."""

    tokens: Sequence[int]
    """All tokens before it."""
    row: int
    noise_key: tuple[int, int] | None
    """None: the likeliest token is taken."""
    temperature: float
    stop_ids: tuple[int, ...]
    limit: int
    """Most tokens of this segment."""
    start: int = 0
    """Model tokens of the episode before it."""
    continues: int | None = None
    keep: bool = False
    in_parts: bool = False


@dataclass
class Sampled:
    """A finished model segment; n = its tokens."""

    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    states: list[SpanStates] = field(default_factory=list)
    """The hidden states from which they were sampled, by policy."""
    finish: Finish = "length"
    text: str = ""
    """Without the stop token or the stop text."""
    last: int | None = None
    """The request that kept its cache, if one did."""

    def add(self, piece: Piece) -> None:
        self.tokens.extend(piece.tokens)
        self.log_probabilities.extend(piece.log_probabilities.tolist())
        add_states(self.states, piece)

    def cut(self, count: int) -> None:
        """Drop all tokens but the first `count`."""
        del self.tokens[count:], self.log_probabilities[count:]
        kept: list[SpanStates] = []
        for span in self.states:
            rows = span.hidden[:count]
            if len(rows):
                kept.append(SpanStates(span.policy, span.before, [rows]))
            count -= len(rows)
        self.states = kept

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(Span(each.policy, len(each.hidden)) for each in self.states)


Tell = Callable[[Sampled, str], Awaitable[None]]
"""Hears of the segment so far, and of the text that is certain by now."""


async def sample(driver: Driver, ask: Ask, text: Text, tell: Tell | None = None) -> Sampled:
    """Sample one segment; raises `ValueError` for one that the engine cannot serve."""
    found = Sampled(last=ask.continues)
    size = PART_TOKENS if ask.in_parts else ask.limit
    try:
        driver.capabilities.check_request(_request(ask, 0, 0, ask.limit, None, keep=False))
        while True:
            done = len(found.tokens)
            upto = min(done + size, ask.limit)
            id, keep = driver.next_id(), ask.keep or upto < ask.limit
            piece = await driver.piece(
                _request(ask, id, done, upto, found.last, keep, found.tokens)
            )
            found.last = id if keep else None
            found.add(piece)
            is_full = len(found.tokens) >= ask.limit
            stopped_at = text.add(found.tokens, is_full or piece.finish == "stop")
            if stopped_at is not None and stopped_at < len(found.tokens):
                found.cut(stopped_at)
                _release(driver, found)  # its cache holds more than is left
            if stopped_at is not None or piece.finish == "stop":
                found.finish = "stop"
                break
            if is_full:
                break
            if tell is not None:
                await tell(found, text.certain)
    except BaseException:
        _release(driver, found)
        raise
    if not ask.keep:
        _release(driver, found)
    found.text = text.whole
    return found


def _request(
    ask: Ask,
    id: int,
    done: int,
    upto: int,
    continues: int | None,
    keep: bool,
    sampled: Sequence[int] = (),
) -> Request:
    return Request(
        id=id,
        tokens=[*ask.tokens, *sampled],
        row=ask.row,
        noise_key=ask.noise_key,
        temperature=ask.temperature,
        stop_ids=ask.stop_ids,
        limit=ask.start + upto,
        start=ask.start + done,
        continues=continues,
        keep=keep,
    )


def _release(driver: Driver, found: Sampled) -> None:
    if found.last is not None:
        driver.release(found.last)
        found.last = None
