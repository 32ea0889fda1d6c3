"""Runs a trio program in virtual time, the same way every time for one seed.

Whenever every task waits, trio asks the clock how long to sleep. `VirtualClock` never sleeps: it
does what is due on the timeline (messages arriving, transfers ending), jumps to the next deadline,
or says that nothing can ever happen. So a message costs no task of the simulator's own, and no
turn of trio's loop unless it wakes somebody.

trio shuffles the tasks of each scheduling step; with its deterministic scheduling on, the order is
drawn from a generator that is seeded here, over tasks sorted by age. The names of trio used are
private: trio is pinned, and `check_trio` says clearly when another version lacks them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path
from typing import Any, Protocol, TypeVar

import trio

from simnet.seeded import source
from swarm.errors import SwarmError

T = TypeVar("T")

TASKS_NAMED_MAX = 20
"""Waiting tasks named by `Deadlock`."""

GARBAGE_THRESHOLDS = (200_000, 20, 20)
"""For Python's collector: a simulation makes millions of objects that live on, which the default
(700, 10, 10) would look through again and again."""


class Deadlock(SwarmError):
    """Every task waits and no deadline is set, so nothing can ever happen again."""


class TrioChanged(SwarmError):
    """This version of trio lacks a private name that simulations need."""


class Agenda(Protocol):
    """What is to happen and when (`simnet.timeline.Timeline`)."""

    def next_time(self) -> float: ...

    def do_due(self, now: float) -> None: ...


class VirtualClock(trio.abc.Clock):
    """Virtual seconds from 0, and the timeline whose actions happen between trio's turns."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        """`give_up` is called, once, when nothing can ever happen or an action failed."""
        self.now = 0.0
        self.timeline: Agenda | None = None
        self.paused = False
        """Whether time stands still: set by a signal handler that wants a turn first."""
        self.failure: BaseException | None = None
        """What an action of the timeline raised."""
        self._give_up = give_up
        self._runner: Any = None

    def start_clock(self) -> None:
        self._runner = trio._core._run.GLOBAL_RUN_CONTEXT.runner

    def current_time(self) -> float:
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Called when no task can run: moves time on until one can, or to `deadline`. 0, unless
        `wait_all_tasks_blocked` waits, for which time stands still."""
        runner = self._runner
        while not self.paused:
            due = self.timeline.next_time() if self.timeline is not None else inf
            if due > self.now and runner.waiting_for_idle:
                return min(due, deadline) - self.now
            if due > deadline:
                self.now = max(self.now, deadline)
                return 0.0
            if due == inf:
                self._give_up()
                return 0.0
            self.now = max(self.now, due)
            assert self.timeline is not None
            try:
                self.timeline.do_due(self.now)
            except Exception as error:
                self.failure = error
                self._give_up()
            if runner.runq:
                return 0.0
            deadline = runner.deadlines.next_deadline()
        return 0.0


def virtual_clock() -> VirtualClock:
    """The clock of the simulation that is running; raises `RuntimeError` outside `run_virtual`."""
    clock = trio.lowlevel.current_clock()
    if not isinstance(clock, VirtualClock):
        raise RuntimeError("this runs in virtual time only: use simnet.clock.run_virtual")
    return clock


def check_trio() -> None:
    """Raise `TrioChanged` naming what this trio lacks. Called by every run."""
    run = trio._core._run
    wanted: list[tuple[Any, str]] = [
        (run, "_ALLOW_DETERMINISTIC_SCHEDULING"),
        (run, "_r"),
        (run, "GLOBAL_RUN_CONTEXT"),
        (run.Runner, "waiting_for_idle"),
        (run.Runner, "runq"),
        (run.Runner, "deadlines"),
        (run.Deadlines, "next_deadline"),
    ]
    for owner, name in wanted:
        if not hasattr(owner, name):
            raise TrioChanged(
                f"trio {trio.__version__} has no {name}, so a simulation would not repeat; "
                "simnet is written for trio 0.35.0"
            )


def run_virtual(
    main: Callable[..., Awaitable[T]], *args: Any, seed: int, limit_seconds: float = inf
) -> T:
    """`trio.run(main, *args)` in virtual time from 0, scheduled by `seed`.

    Raises `Deadlock` when nothing can ever happen, naming the tasks that wait, and
    `trio.TooSlowError` after `limit_seconds` of virtual time.
    """
    check_trio()
    scope = trio.CancelScope()
    stuck: list[str] = []

    def give_up() -> None:
        if clock.failure is None:
            stuck.extend(_waiting_tasks())
        scope.cancel()

    clock = VirtualClock(give_up)

    async def bounded() -> T:
        with scope:
            if limit_seconds == inf:
                return await main(*args)
            with trio.fail_after(limit_seconds):
                return await main(*args)
        if clock.failure is not None:
            raise clock.failure
        raise Deadlock(f"nothing can ever happen again; waiting: {', '.join(stuck)}")

    run: Any = trio._core._run
    run._r.seed(source(seed, "scheduling").getrandbits(64))
    before = run._ALLOW_DETERMINISTIC_SCHEDULING
    thresholds = gc.get_threshold()
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    try:
        return trio.run(bounded, clock=clock)
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = before
        gc.set_threshold(*thresholds)


def _waiting_tasks() -> list[str]:
    """What the simulation waits for: its main task, then the names of the tasks without children,
    sorted, each with where it waits."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    main = next((task for task in _children(root) if "run_virtual" in task.name), None)
    leaves, todo = [], [root]
    while todo:
        task = todo.pop()
        children = _children(task)
        own = task.name.startswith(("trio.", "simulated network")) or task is main
        if not children and not own:
            leaves.append(f"{task.name} ({_position(task)})")
        todo += children
    leaves.sort()
    if len(leaves) > TASKS_NAMED_MAX:
        leaves[TASKS_NAMED_MAX:] = [f"and {len(leaves) - TASKS_NAMED_MAX} more"]
    return ([f"the main task ({_position(main)})"] if main is not None else []) + leaves


def _children(task: trio.lowlevel.Task) -> list[trio.lowlevel.Task]:
    return [child for nursery in task.child_nurseries for child in nursery.child_tasks]


def _position(task: trio.lowlevel.Task) -> str:
    """`function, file:line` of the innermost frame of a waiting task outside trio."""
    where = "not begun"
    for frame, line in task.iter_await_frames():
        if f"{os.sep}trio{os.sep}" not in frame.f_code.co_filename:
            path = Path(frame.f_code.co_filename)
            where = f"{frame.f_code.co_name}, {path.parent.name}/{path.name}:{line}"
    return where
