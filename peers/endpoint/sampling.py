"""Sampling of one model segment in requests of a few tokens, so that it can be streamed or end at a
text. Each continues the cache; noise depends on a token's position, so the tokens are the same."""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter

import trio

from peers.engines.engine import Engine, Piece, Request
from peers.engines.episodes import SpanStates, add_states
from peers.environments.renderer import Renderer
from swarm.errors import SwarmError
from swarm.rollouts.rollout import Finish, Span

HOP_SECONDS = 0.05
"""Longest time in the thread: a stopping server waits for it."""


@dataclass
class _Waiting:
    """A task that waits for a request's piece."""

    done: trio.Event = field(default_factory=trio.Event)
    found: Piece | ValueError | None = None


class Driver:
    """An engine that has no other requests, and the loop that steps it while it has some."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.capabilities = engine.capabilities
        self._ids = count()
        self._inbox: deque[Request | int] = deque()
        """Requests to submit, and ids to cancel, in order."""
        self._submitted: set[int] = set()
        """Requests that the engine holds."""
        self._waiting: dict[int, _Waiting] = {}
        self._work = trio.Event()

    def next_id(self) -> int:
        """An id that no request has yet."""
        return next(self._ids)

    async def piece(self, request: Request) -> Piece:
        """Generate one request. Raises `ValueError` as `Engine.submit`; cancelling drops it."""
        waiting = self._waiting[request.id] = _Waiting()
        self._put(request)
        try:
            await waiting.done.wait()
        except trio.Cancelled:
            self._waiting.pop(request.id, None)
            self.release(request.id)
            raise
        assert waiting.found is not None
        if isinstance(waiting.found, ValueError):
            raise waiting.found
        return waiting.found

    def release(self, id: int) -> None:
        """Drop a request, or the cache that it kept."""
        self._put(id)

    @property
    def live(self) -> int:
        """Requests under way."""
        return len(self._waiting)

    async def run(self) -> None:
        """Step the engine whenever there is work; raises `SwarmError` when the engine fails."""
        while True:
            await self._work.wait()
            try:
                found = await trio.to_thread.run_sync(self._advance)
            except Exception as error:  # an engine may fail in any way, and its state is unknown
                raise SwarmError(
                    f"the engine failed ({type(error).__name__}: {error}); start the endpoint again"
                ) from error
            for id, each in found:
                waiting = self._waiting.pop(id, None)
                if waiting is None:
                    self._put(id)  # cancelled meanwhile: its cache is not wanted
                else:
                    waiting.found = each
                    waiting.done.set()
            if not self._inbox and not self._submitted:
                self._work = trio.Event()

    def _advance(self) -> list[tuple[int, Piece | ValueError]]:
        """Step until a request is finished or refused, none is left, or `HOP_SECONDS` are over."""
        until = perf_counter() + HOP_SECONDS
        found: list[tuple[int, Piece | ValueError]] = []
        while True:
            while self._inbox:
                item = self._inbox.popleft()
                if isinstance(item, int):
                    self.engine.cancel(item)
                    self._submitted.discard(item)
                    continue
                try:
                    self.engine.submit(item)
                    self._submitted.add(item.id)
                except ValueError as error:
                    found.append((item.id, error))
            if found or not self._submitted or perf_counter() > until:
                return found
            for piece in self.engine.step():
                self._submitted.discard(piece.id)
                found.append((piece.id, piece))

    def _put(self, item: Request | int) -> None:
        self._inbox.append(item)
        self._work.set()


UNFINISHED = "\ufffd"
"""What a decoder gives for bytes that are no whole character yet."""

WINDOW_TOKENS_MAX = 256
"""Tokens decoded at a look: a character has at most four, and a longer run of bytes is garbage."""


class Text:
    """Decodes a growing list of tokens, looks for stop texts, and says what is certain."""

    def __init__(self, renderer: Renderer, stop_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._renderer = renderer
        self._stop_ids = stop_ids
        self._stops = [stop for stop in stops if stop]
        self._longest_stop = max(map(len, self._stops), default=0)
        self._seen = 0
        """Tokens at the last look."""
        self._start, self._read, self._text = 0, 0, ""
        """`_text` is the text of the tokens before `_read`. A look decodes from `_start` on, since
        the text of a token may depend on the one before it."""
        self.whole = ""
        """The text, without the stop token, and up to the stop text."""
        self.certain = ""
        """The part of `whole` that further tokens leave as it is."""

    def add(self, tokens: Sequence[int], ended: bool) -> int | None:
        """The tokens up to the first stop text's end, if any; `ended`: no others follow."""
        self.whole = self._decode(tokens) if ended else self._decode_on(tokens)
        found = self._first_stop(self.whole, max(0, len(self.certain) - self._longest_stop))
        if found is None:
            self.certain = self.whole if ended else self._without_doubt()
            self._seen = len(tokens)
            return None
        self.whole = self.certain = self.whole[:found]
        for length in range(self._seen + 1, len(tokens)):
            if self._first_stop(self._decode(tokens[:length])) is not None:
                return length
        return len(tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._renderer.decode_completion(tokens, self._stop_ids)[0]

    def _decode_on(self, tokens: Sequence[int]) -> str:
        """The text of all tokens, from what was read of them before."""
        known = self._decode(tokens[self._start : self._read])
        grown = self._decode(tokens[self._start :])
        text = self._text + grown[len(known) :]
        is_garbage = len(tokens) - self._start > WINDOW_TOKENS_MAX
        if is_garbage or not grown.endswith(UNFINISHED):
            self._start, self._read, self._text = self._read, len(tokens), text
        return text

    def _first_stop(self, text: str, start: int = 0) -> int | None:
        found = [at for stop in self._stops if (at := text.find(stop, start)) >= 0]
        return min(found, default=None)

    def _without_doubt(self) -> str:
        """`whole` without an unfinished character, or the beginning of a stop text, at its end."""
        text = self.whole.rstrip(UNFINISHED)
        doubtful = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), doubtful, -1):
                if text.endswith(stop[:length]):
                    doubtful = length
                    break
        return text[: len(text) - doubtful]


PART_TOKENS = 8
"""Tokens per event of a stream, and between two looks for a stop text."""


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


async def sample(
    driver: Driver, request: Request, text: Text, *, in_parts: bool, tell: Tell | None = None
) -> Sampled:
    """Sample a segment in parts; raises `ValueError` for one that the engine cannot serve."""
    found = Sampled(last=request.continues)
    size = PART_TOKENS if in_parts else request.limit
    try:
        driver.capabilities.check_request(request)
        while True:
            start = request.start + len(found.tokens)
            upto = min(start + size, request.limit)
            part = replace(
                request,
                id=driver.next_id(),
                tokens=[*request.tokens, *found.tokens],
                limit=upto,
                start=start,
                continues=found.last,
                keep=request.keep or upto < request.limit,
            )
            piece = await driver.piece(part)
            found.last = part.id if part.keep else None
            found.add(piece)
            is_full = request.start + len(found.tokens) >= request.limit
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
    if not request.keep:
        _release(driver, found)
    found.text = text.whole
    return found


def _release(driver: Driver, found: Sampled) -> None:
    if found.last is not None:
        driver.release(found.last)
        found.last = None
