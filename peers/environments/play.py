"""Calls of an environment's code, which is a lab's and may fail in any way.

Every failure, and a call that does not return, becomes a `UserError` that names the environment."""

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from peers.environments.interface import (
    Conversation,
    Environment,
    Grade,
    Message,
    NotGradable,
    Split,
    Task,
    Transcript,
    UnusableTask,
    episodes_of,
)
from peers.environments.prompt_room import PromptRoom
from peers.environments.tasks import Indexed, indexed
from swarm.errors import UserError
from swarm.rollouts.seeds import digest
from swarm.world.progress import HUNG_STATUS, Reporter, current

# A time limit for calls of an environment's code, which may never return.
#
# A watching thread raises an exception in the thread whose call is overdue. That ends Python code,
# but neither a blocking system call nor a library that keeps the interpreter busy: then the process
# ends with the sentence as its last words, and its owner starts another.

REPORT_SECONDS = 10.0
"""Interval at which progress is reported for a call within its limit, so that nobody takes its
process for hung. The shortest patience of a job that calls environments is 60 s."""

GRACE_SECONDS = 5.0
"""Time that an interrupted call has to end before its process does."""


class _OverdueError(BaseException):
    """Raised inside a call; no `except Exception` of the environment's code catches it."""


@dataclass(eq=False)
class _Call:
    deadline: float
    sentence: Callable[[], str]
    thread: int = field(default_factory=threading.get_ident)
    reporter: Reporter | None = field(default_factory=current.get)
    is_interrupted: bool = False


class _Watch:
    """The calls that are running, and the thread that ends those that are overdue."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._calls: set[_Call] = set()
        self._sleeps_until = -math.inf
        """-inf: the thread has not been started; inf: it sleeps until the next call."""

    @contextmanager
    def limited(self, seconds: float, sentence: Callable[[], str]) -> Iterator[None]:
        call = _Call(time.monotonic() + seconds, sentence)
        with self._changed:
            self._calls.add(call)
            if self._sleeps_until == -math.inf:
                threading.Thread(target=self._run, name="deadlines", daemon=True).start()
                self._sleeps_until = call.deadline
            elif call.deadline < self._sleeps_until:
                self._changed.notify()
        try:
            yield
        except _OverdueError:
            raise UserError(sentence()) from None
        finally:
            # The exception may not have arrived yet: with the lock itself, whose entry is one
            # bytecode, it cannot arrive between taking the lock and being ready to release it.
            try:
                with self._lock:
                    self._calls.discard(call)
                if call.is_interrupted:
                    _raise_in(call.thread)
            except _OverdueError:
                pass

    def _run(self) -> None:
        with self._changed:
            while True:
                self._sleeps_until = math.inf
                if self._calls:
                    first = min(call.deadline for call in self._calls)
                    self._sleeps_until = min(first, time.monotonic() + REPORT_SECONDS)
                    self._changed.wait(max(0.0, self._sleeps_until - time.monotonic()))
                else:
                    self._changed.wait()
                now = time.monotonic()
                for call in self._calls:
                    if call.deadline <= now:
                        self._end(call, now)
                    elif call.reporter is not None:
                        call.reporter.report_from_any_thread()

    @staticmethod
    def _end(call: _Call, now: float) -> None:
        if call.is_interrupted:
            sys.stderr.write(f"{call.sentence()}\n")
            sys.stderr.flush()
            os._exit(HUNG_STATUS)
        call.is_interrupted, call.deadline = True, now + GRACE_SECONDS
        _raise_in(call.thread)


def _raise_in(thread: int) -> None:
    """Raise `_OverdueError` at the next bytecode of a thread, in place of one that has not come.

    Never revoke one with NULL: CPython 3.11 then keeps its signal for ever, and a thread that is
    traced (by coverage, a debugger, hypothesis) waits at its next function without end."""
    error = ctypes.py_object(_OverdueError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


limited = _Watch().limited
"""Limit the time of the block, in seconds; raises `UserError` with the sentence."""


Observation = str | tuple[Message, ...]

TARGET_LENGTH_BITS = 32
"""Bits of a task's target length in the probe hash."""


REDRAWS_MAX = 64
"""Draws for a seed. If half of all tasks are unusable, all of these are with probability 2^-64."""


def task_of(
    environment: Environment, seed: bytes, split: Split = "train", *, room: PromptRoom | None = None
) -> Task:
    """Draw the task of a seed, with `room` the first whose prompt it takes; raises `UserError`, and
    `UnusableTask` if it takes none of `REDRAWS_MAX`."""
    if room is None:
        return _drawn(environment, seed, split)
    for attempt in range(REDRAWS_MAX):
        again = digest("swarm/1/redraw", seed, attempt.to_bytes(4, "big")) if attempt else seed
        task = _drawn(environment, again, split)
        try:
            room.encode(task.prompt)
            return task
        except UnusableTask as error:
            unusable = f"{task.own.place}: {error}" if task.own.place else str(error)
    raise UnusableTask(
        f"environment {environment.name!r} draws no task that this model can be given, in "
        f"{REDRAWS_MAX} draws; of the last: {unusable}"
    )


def _drawn(environment: Environment, seed: bytes, split: Split) -> Task:
    with failures(cannot_draw(environment)), _limited(environment, "draw a task"):
        task = environment.cached_tasks.draw(seed, split)
    if not isinstance(task, Task) or not _is_prompt(_messages(task.prompt)):
        raise UserError(
            f"environment {environment.name!r} draws {shown(task, 100)}; it must be a Task with a "
            "prompt of text or a tuple of messages"
        )
    for name, value, is_right, right in (
        ("answer", task.answer, is_text(task.answer), "text, as the model writes it"),
        (
            "demonstration",
            task.demonstration,
            isinstance(task.demonstration, tuple) and all(map(is_text, task.demonstration)),
            "a tuple of texts",
        ),
        (
            "target_length",
            task.target_length,
            isinstance(task.target_length, int)
            and 0 <= task.target_length < 1 << TARGET_LENGTH_BITS,
            "a number of tokens, 0 or more",
        ),
    ):
        if not is_right:
            raise UserError(
                f"environment {environment.name!r} draws a task whose {name} is "
                f"{shown(value, 100)}; it must be {right}"
            )
    return task


def indexed_tasks(environment: Environment) -> Indexed | None:
    """An environment's tasks by index, if there are finitely many; raises `UserError`."""
    with failures(cannot_draw(environment)), _limited(environment, "list its tasks"):
        return indexed(environment.cached_tasks)


class Episode:
    """The environment's side of one episode."""

    def __init__(self, environment: Environment, task: Task) -> None:
        self._environment, self._task = environment, task.own
        self._answering = episodes_of(environment)
        self._state: Any = None
        self._is_started = False

    def step(self, text: str) -> Observation | None:
        """The observation after the model's next turn, or None at the end; raises `NotGradable` as
        the environment does, and `UserError` when its code fails."""
        if self._answering is None:
            return None
        name, turn = self._environment.name, f"{text[:40]!r}{_of_row(self._task)}"
        with (
            failures(
                lambda error: (
                    f"environment {name!r} cannot answer the turn {turn} ({error}); repair it"
                )
            ),
            _limited(self._environment, f"answer the turn {turn}"),
        ):
            try:
                if not self._is_started:
                    self._state, self._is_started = self._answering.start(self._task), True
                observation = self._answering.step(self._state, text)
            except NotGradable as error:
                raise NotGradable(
                    f"environment {name!r} cannot know its answer to the turn {turn}: {error}"
                ) from error
        if observation is not None and not _is_prompt(observation):
            raise UserError(
                f"environment {name!r} answers the turn {turn} with "
                f"{shown(observation, 100)}; it must be text, a tuple of messages, or None to end "
                "the episode"
            )
        return observation


def grade(environment: Environment, task: Task, transcript: Transcript) -> Grade:
    """The environment's grade of an episode; raises `NotGradable` as the environment does, and
    `UserError` when its code fails or the reward is not in [0, 1]."""
    text = f"{transcript.text[:40]!r}{_of_row(task.own)}"
    try:
        with (
            failures(
                lambda error: (
                    f"environment {environment.name!r} cannot grade the completion {text} "
                    f"({error}); a reward must never raise, but be 0 for what it does not "
                    "understand"
                )
            ),
            _limited(environment, f"grade the completion {text}"),
        ):
            given = environment.grade(task.own, transcript)
    except NotGradable as error:
        raise NotGradable(
            f"environment {environment.name!r} cannot know the reward of the completion {text}: "
            f"{error}"
        ) from error
    graded = given if isinstance(given, Grade) else Grade(given)
    if not _is_finite(graded.reward) or not 0 <= graded.reward <= 1:
        raise UserError(
            f"environment {environment.name!r} gives the completion {text} the reward "
            f"{shown(graded.reward, 40)}; it must be a number in [0, 1]"
        )
    if not isinstance(graded.parts, Mapping):
        raise UserError(
            f"environment {environment.name!r} gives the completion {text} the parts "
            f"{shown(graded.parts, 40)}; they must be a dictionary of names and numbers"
        )
    for name, part in graded.parts.items():
        if not is_text(name) or not _is_finite(part):
            raise UserError(
                f"environment {environment.name!r} gives the completion {text} the part "
                f"{shown(name, 40)} = {shown(part, 40)}; it must be a name with a finite number"
            )
    return Grade(float(graded.reward), {name: float(part) for name, part in graded.parts.items()})


def graded_alike(environment: Environment, task: Task, transcript: Transcript) -> Grade:
    """The grade of an episode, computed twice; raises `UserError` if the two rewards differ."""
    given, again = (grade(environment, task, transcript) for _ in range(2))
    if given != again:
        raise UserError(
            f"environment {environment.name!r} gives the completion {transcript.text[:40]!r} first "
            f"the reward {given.reward:g}, then {again.reward:g}; equal texts must get equal "
            "rewards"
        )
    return given


def _of_row(task: Task) -> str:
    return f" of {task.place}" if task.place else ""


def _limited(environment: Environment, what: str) -> AbstractContextManager[None]:
    return limited(
        environment.call_seconds,
        lambda: (
            f"environment {environment.name!r} took more than {environment.call_seconds:g} s to "
            f"{what}; make it faster, or raise its call_seconds"
        ),
    )


@contextmanager
def failures(sentence: Callable[[str], str]) -> Iterator[None]:
    """Raise every error of an environment's code as a `UserError` with a sentence about it, but for
    cancellation, and the user's own Ctrl-C, which reaches the main thread."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if isinstance(error, trio.Cancelled) and _is_cancelled():
            raise
        in_main = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and in_main:
            raise
        raise UserError(sentence(described(error))) from error


def _is_cancelled() -> bool:
    """Whether this thread's job is cancelled: an environment's code can raise `Cancelled`, too."""
    try:
        trio.from_thread.check_cancelled()
    except trio.Cancelled:
        return True
    except RuntimeError:  # no thread of trio's
        pass
    return False


def cannot_draw(environment: Environment) -> Callable[[str], str]:
    """The sentence for an error of `tasks`."""
    return lambda error: f"environment {environment.name!r} cannot draw a task ({error}); repair it"


def described(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:  # a lab's class may do anything
        message = "its message cannot be printed"
    if type(error) is not ValueError or not message:  # whose message is a sentence mostly
        message = f"{type(error).__name__}: {message}"
    return message.replace("\n", " ")[:200]


def shown(value: object, characters: int) -> str:
    """The beginning of a value's representation, which a lab's class may fail to give."""
    try:
        return repr(value)[:characters]
    except Exception:
        return f"an object of {type(value).__name__} that cannot be printed"


def _messages(prompt: object) -> object:
    return prompt.messages if isinstance(prompt, Conversation) else prompt


def _is_prompt(value: object) -> bool:
    if isinstance(value, str):
        return is_text(value)
    return (
        isinstance(value, tuple)
        and bool(value)
        and all(
            isinstance(each, Message) and is_text(each.role) and is_text(each.content)
            for each in value
        )
    )


def is_text(value: object) -> bool:
    """Whether a value is text that a tokenizer takes: half of a UTF-16 pair is none."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
