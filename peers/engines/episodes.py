"""Episodes: an engine generates and the environment answers in turns, until every episode is over.

Each episode goes on by itself: its next turn is submitted as soon as the environment has answered.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Self

import torch
from torch import Tensor

from peers.engines.engine import Engine, Piece, Request
from peers.environments import Environment, Renderer, Task, episodes_of
from peers.environments.episodes import EpisodeLimits, Replies
from peers.environments.interface import Prompt
from swarm.errors import UserError
from swarm.jobs.inference import TurnFailed
from swarm.rollouts.rollout import Rollout, Segment, Span
from swarm.rollouts.signed_turns import is_answered
from swarm.wire.manifest import Sampling
from swarm.world.progress import checkpoint, current


@dataclass
class SpanStates:
    """The hidden states from which one policy sampled successive tokens of an episode."""

    policy: int
    before: Tensor
    """bf16 [at most 128, hidden]: the rows just before `hidden`, of the same policy."""
    parts: list[Tensor]

    @property
    def hidden(self) -> Tensor:
        """bf16 [tokens, hidden]."""
        return _joined(self.parts)


def add_states(states: list[SpanStates], piece: Piece) -> None:
    """Append a piece's hidden states to those of the tokens before it."""
    rows = torch.split(piece.hidden, [count for _, count in piece.spans])
    before = [piece.prompt_hidden, *piece.swap_hidden]
    for (policy, _), part, rows_before in zip(piece.spans, rows, before, strict=True):
        if states and states[-1].policy == policy:
            states[-1].parts.append(part)
        else:
            states.append(SpanStates(policy, rows_before, [part]))


OnEnd = Callable[[int, Rollout, Sequence[SpanStates]], None]
"""(row, rollout, the states of each of its spans)."""


@dataclass(frozen=True)
class Episodes:
    """Finished episodes, row by row; n = model tokens of the row."""

    rollouts: list[Rollout]
    hidden: list[Tensor]
    """bf16 [n, hidden]: see `peers.engines.engine.Piece`."""
    prompt_hidden: list[Tensor]
    """bf16 [at most 128, hidden]: the rows before the first of `hidden`."""


WAIT_SECONDS = 0.5
"""Longest wait for an environment's turn before the caller may cancel."""

QUICK_SECONDS = 0.05
"""Time that the engine waits for an environment here, whose answer mostly takes less: the episode
then keeps its slot, and the batch of a seed is the same each time. A slower one gives it up."""


@dataclass(frozen=True, eq=False)
class ServedTask:
    """A group's prompt from an environment peer, which is asked for the turns that follow it."""

    prompt: Sequence[int]
    last: bool
    """Whether the model's first segment ends the episode."""
    ask: Callable[[int, Sequence[Segment]], None]
    """Ask for the turn of a row after these segments. `Player.answer` gives it later."""


@dataclass(frozen=True, eq=False)
class ContinuedTask:
    """A state of a rollout that a group continues, by one model segment."""

    task: Task
    prefix: Sequence[int]
    """The rollout's model tokens up to the state; they are part of the prompt here."""


Work = tuple[Environment, Task] | ServedTask | ContinuedTask
"""What an episode is about."""


@dataclass
class _Row:
    """An unfinished episode."""

    work: Work
    row: int
    segments: list[Segment]
    states: list[SpanStates]
    temperature: float
    last: int | None = None
    """Id of the last request."""
    replies: Replies | None = None
    """The environment's side, once it has answered."""

    def request(self, id: int, noise_key: tuple[int, int] | None, sampling: Sampling) -> Request:
        """The request for the episode's next model segment."""
        # A continued prompt has used up some of the length limit.
        before = len(self.work.prefix) if isinstance(self.work, ContinuedTask) else 0
        return Request(
            id=id,
            tokens=[token for segment in self.segments for token in segment.tokens],
            row=self.row,
            noise_key=noise_key,
            temperature=self.temperature,
            stop_ids=tuple(sampling.stop_ids),
            limit=sampling.max_new_tokens - before,
            start=sum(len(each.tokens) for each in self.segments if each.kind == "model"),
            continues=self.last,
            keep=self.has_turns,
        )

    def add(self, piece: Piece) -> None:
        """Append the model segment that a request gave."""
        self.segments.append(
            Segment(
                "model",
                piece.tokens,
                piece.finish,
                piece.log_probabilities.tolist(),
                tuple(Span(policy, count) for policy, count in piece.spans),
            )
        )
        add_states(self.states, piece)

    @property
    def has_turns(self) -> bool:
        """Whether the environment may answer the model."""
        if isinstance(self.work, ContinuedTask):
            return False
        if isinstance(self.work, ServedTask):
            return not self.work.last
        return episodes_of(self.work[0]) is not None

    def shares_prompt(self, other: Self) -> bool:
        """Whether another episode is about the same task."""
        mine, others = (w[1] if isinstance(w, tuple) else w for w in (self.work, other.work))
        return mine is others

    def rollout(self) -> Rollout:
        return Rollout(tuple(self.segments))


class Playing:
    """A set of episodes with one noise key: those of one submission."""

    def __init__(
        self,
        renderer: Renderer,
        work: Sequence[Work],
        rows: Sequence[int],
        noise_key: tuple[int, int] | None,
        sampling: Sampling,
        on_end: OnEnd | None = None,
        temperatures: Sequence[float] = (),
    ) -> None:
        """One episode per item of `work`. `rows` and `noise_key` as in `Request`; `on_end` hears of
        each episode as soon as it is over. `temperatures`: one per item; empty: `sampling`'s."""
        self.renderer, self.noise_key, self.sampling = renderer, noise_key, sampling
        prompts = _prompts_of(renderer, work)
        self.played = [
            _Row(each, row, [Segment("prompt", prompt)], [], temperature)
            for each, row, prompt, temperature in zip(
                work, rows, prompts, temperatures or [sampling.temperature] * len(work), strict=True
            )
        ]
        self.waiting = deque(self.played)
        """Episodes that have not begun."""
        self.left = len(self.played)
        """Episodes that are not over."""
        self.seconds = 0.0
        """Time of the engine's steps; of a shared step, the share of the episodes in it."""
        self.error: BaseException | None = None
        """Why these episodes were given up, set here or by any thread that wants them no more."""
        self._on_end = on_end
        self.asked: dict[int, _Row] = {}
        """Episodes whose environment, here or at its peer, was asked for a turn."""
        self.answers: deque[tuple[int, Sequence[int]]] = deque()
        """(row, tokens) of the turns that came; any thread appends."""
        self.reporter = current.get()
        """Reports progress to whoever called for these episodes."""

    @property
    def is_over(self) -> bool:
        return self.left == 0 or self.error is not None

    @property
    def leaves_room(self) -> bool:
        """Whether all its episodes have begun, and most of those that are left wait for a turn."""
        return not self.waiting and 2 * len(self.asked) > self.left

    def end(self, row: _Row) -> None:
        """Note that an episode is over."""
        self.left -= 1
        if self._on_end is not None:
            self._on_end(row.row, row.rollout(), row.states)

    def episodes(self) -> Episodes:
        """The finished episodes."""
        return Episodes(
            rollouts=[row.rollout() for row in self.played],
            hidden=[_joined([each.hidden for each in row.states]) for row in self.played],
            prompt_hidden=[row.states[0].before for row in self.played],
        )


def _prompts_of(renderer: Renderer, work: Sequence[Work]) -> Iterator[Sequence[int]]:
    """Token ids of prompts, each rendered once."""
    rendered: dict[Prompt, Sequence[int]] = {}
    for each in work:
        if isinstance(each, ServedTask):
            yield each.prompt
        elif isinstance(each, ContinuedTask):
            yield [*renderer.encode_prompt(each.task.prompt), *each.prefix]
        else:
            prompt = each[1].prompt
            if prompt not in rendered:
                rendered[prompt] = renderer.encode_prompt(prompt)
            yield rendered[prompt]


class _Answering:
    """A thread for the environments that run here, whose code need not be safe in two at once. It
    lives while there are calls."""

    def __init__(self) -> None:
        self._turn, self._next = Lock(), Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = Lock()
        self._is_running = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold this while an environment's code runs, in whatever thread.

        Who waits for it is `_next`, so that the thread, which wants it again at once for the next
        call, does not overtake a submission that draws its tasks."""
        with self._next:
            self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()

    def start(self, call: Callable[[], None]) -> None:
        """Run `call`, which must not raise, after those before it."""
        with self._lock:
            self._calls.append(call)
            if self._is_running:
                return
            self._is_running = True
        Thread(target=self._run, name="environments", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._is_running = False
                    return
                call = self._calls.popleft()
            with self.turn():
                call()


class Player:
    """Plays sets of episodes on an engine that has no other requests.

    Up to `sets_at_once` sets share the batch: episodes of the next set begin as those of the sets
    before it end, or wait for an environment that takes long. As many are generated at once as the
    largest set has."""

    def __init__(
        self,
        engine: Engine,
        sets_at_once: int = 1,
        stall: Callable[[int], None] = lambda sets: None,
    ) -> None:
        """`stall` hears of how many sets all episodes wait for environment peers, while they do.
        (Environments here answer one by one: further episodes would only wait longer.)"""
        self._engine = engine
        self._sets_at_once = sets_at_once
        self._stall = stall
        self._ids = count()
        self._sets: list[Playing] = []
        self._going: dict[int, tuple[Playing, _Row]] = {}
        """By id of the request."""
        self.seconds = 0.0
        """Time of all steps."""
        self._answering = _Answering()
        self.environments_turn = self._answering.turn
        self._answered = Event()
        """Set when the environments here have answered the last call."""
        self._answered.set()
        self._news = Event()
        """Set when a turn has come."""

    @property
    def is_idle(self) -> bool:
        return not self._sets

    def add(self, playing: Playing) -> None:
        """Let a set follow all others; another thread may step meanwhile."""
        if not playing.is_over:
            self._sets.append(playing)
            self._news.set()

    def step(self) -> None:
        """Advance the episodes by an engine's step.

        A set whose environment or request fails is given up, with its `error`. An error of the
        engine itself is raised; the caller then gives up its set."""
        self.drop_failed()
        self._take_answers()
        self._begin()
        if not self._going and any(playing.asked for playing in self._sets):
            asked = [row.work for playing in self._sets for row in playing.asked.values()]
            if all(isinstance(each, ServedTask) for each in asked):
                self._stall(len(self._sets))
            self._news.wait(WAIT_SECONDS)
        counts = Counter(playing for playing, _ in self._going.values())
        started = perf_counter()
        pieces = self._engine.step() if self._going else []
        seconds = perf_counter() - started
        self.seconds += seconds
        for playing, episodes in counts.items():
            playing.seconds += seconds * episodes / len(self._going)
        for playing in list(self._sets):  # also those that wait: the engine does not hang
            if playing.reporter is not None:
                playing.reporter.report(cancellable=False)
        for piece in pieces:
            self._take(piece)

    def answer(self, playing: Playing, row: int, tokens: Sequence[int]) -> None:
        """Give the turn that was asked for, none at the end of the episode. Any thread may call."""
        playing.answers.append((row, tokens))
        self._news.set()

    def _take_answers(self) -> None:
        # First: an answer that comes while others are read sets it again, and is not slept through.
        self._news.clear()
        for playing in list(self._sets):
            while playing.answers and playing.error is None:
                number, tokens = playing.answers.popleft()
                row = playing.asked.pop(number, None)
                if row is not None:
                    self._try(playing, partial(self._continue, playing, row, tokens))

    def drop_failed(self) -> None:
        """Remove the sets that were given up."""
        for playing in [each for each in self._sets if each.error is not None]:
            self.remove(playing)

    def remove(self, playing: Playing) -> None:
        """Forget a set, and what the engine holds of it."""
        if playing not in self._sets:
            return
        self._sets.remove(playing)
        for id in [id for id, (of, _) in self._going.items() if of is playing]:
            del self._going[id]
            self._engine.cancel(id)
        for row in playing.played:  # a turn not submitted has left the cache of its last
            if row.last is not None:
                self._engine.cancel(row.last)

    def _begin(self) -> None:
        """Begin waiting episodes while there is room; a task's together, to share its prompt."""
        leaving = [each for each in self._sets if each.leaves_room]
        sets = [each for each in self._sets if each not in leaving][: self._sets_at_once]
        room = max((len(each.played) for each in (*leaving, *sets)), default=0)
        for playing in sets:
            while playing.waiting and len(self._going) < room and playing.error is None:
                first = playing.waiting[0]
                while playing.waiting and playing.waiting[0].shares_prompt(first):
                    self._try(playing, partial(self._ask, playing, playing.waiting.popleft()))
                    if playing.error is not None:
                        break

    def _ask(self, playing: Playing, row: _Row) -> None:
        id = next(self._ids)
        self._engine.submit(row.request(id, playing.noise_key, playing.sampling))
        row.last = id
        self._going[id] = (playing, row)

    def _take(self, piece: Piece) -> None:
        if piece.id not in self._going:
            return  # its set was given up over an earlier piece of this step
        playing, row = self._going.pop(piece.id)
        row.add(piece)
        self._try(playing, partial(self._go_on, playing, row))

    def _go_on(self, playing: Playing, row: _Row) -> None:
        """Let the environment answer, or ask its peer, whose answer comes later."""
        sampling, work = playing.sampling, row.work
        if isinstance(work, ServedTask):
            last = work.last and len(row.segments) == 2
            if is_answered(row.segments, last=last, max_new_tokens=sampling.max_new_tokens):
                playing.asked[row.row] = row
                work.ask(row.row, row.segments)
            else:
                self._continue(playing, row, ())
            return
        if not row.has_turns:
            self._continue(playing, row, ())
            return
        assert isinstance(work, tuple)
        if row.replies is None:
            limits = EpisodeLimits(
                sampling.stop_ids, sampling.max_new_tokens, self._engine.capabilities.length_max
            )
            row.replies = Replies(*work, playing.renderer, limits)
        playing.asked[row.row] = row
        is_free, self._answered = self._answered.is_set(), Event()
        call = partial(self._reply, playing, row, row.replies, self._answered)
        self._answering.start(call)
        if is_free and self._answered.wait(QUICK_SECONDS):
            self._take_answers()

    def _reply(self, playing: Playing, row: _Row, replies: Replies, done: Event) -> None:
        """Answer an episode's last segment, in the thread of environments."""
        try:
            if playing.error is None:
                self.answer(playing, row.row, replies.next(row.segments) or ())
        except UserError as error:
            playing.error = TurnFailed(str(error))
        except Exception as error:
            playing.error = error
        finally:
            done.set()
            self._news.set()

    def _continue(self, playing: Playing, row: _Row, answer: Sequence[int]) -> None:
        """Submit an episode's next turn, or end it if the environment does not answer."""
        if not answer:
            assert row.last is not None
            self._engine.cancel(row.last)  # releases its cache
            playing.end(row)
            if playing.left == 0:
                self._sets.remove(playing)
        else:
            row.segments.append(Segment("environment", answer))
            self._ask(playing, row)

    def _try(self, playing: Playing, act: Callable[[], None]) -> None:
        """Act for a set, and give it up if that fails: the other sets go on."""
        try:
            act()
        except Exception as error:
            playing.error = error
            self.remove(playing)


def play(
    engine: Engine,
    renderer: Renderer,
    work: Sequence[Work],
    rows: Sequence[int],
    noise_key: tuple[int, int] | None,
    sampling: Sampling,
) -> Episodes:
    """Play one episode per task on an engine with no other requests.

    `rows` and `noise_key` as in `Request`. Raises `ValueError` as `Engine.submit` does, and
    `UserError` for an environment whose code fails; the engine then holds no request."""
    player = Player(engine)
    playing = Playing(renderer, work, rows, noise_key, sampling)
    player.add(playing)
    finish(player, playing)
    return playing.episodes()


def finish(player: Player, playing: Playing, before_step: Callable[[], None] = checkpoint) -> None:
    """Step until a set is over; raises the error of one that was given up.

    `before_step` is called before each of the engine's steps, and may load other weights. If a step
    fails, or the caller cancels, the set is removed."""
    try:
        while not playing.is_over:
            before_step()
            player.step()
    except BaseException:
        player.remove(playing)
        raise
    finally:
        player.drop_failed()  # also those that other threads gave up: perhaps no step follows
    if playing.error is not None:
        raise playing.error


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows end to end; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
