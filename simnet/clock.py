"""Virtual time: runs a trio program the same way every time for one seed.

`VirtualClock` never sleeps: whenever every task waits, it runs the timeline's due actions, jumps to
the next deadline, or reports a deadlock. So a message needs no task of the simulator's own.

trio's deterministic scheduling sorts tasks by age and draws their order from a generator, seeded
here. The names of trio used are private, and trio is pinned."""

import gc
import heapq
import os
import random
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import trio

from swarm.errors import SwarmError
from swarm.rollouts.seeds import digest


def derive(seed: int, *names: str) -> bytes:
    return digest("simnet/1", str(seed).encode(), *(name.encode() for name in names))


def source(seed: int, *names: str) -> random.Random:
    """The random source of one purpose: `source(seed, "world", peer)`."""
    return random.Random(int.from_bytes(derive(seed, *names), "big"))


EPOCH = 1_800_000_000.0
"""Wall time of virtual second 0 (15 January 2027) on a correct clock."""


class SimulatedWorld:
    """Implements `swarm.world.World`; the wall clock is `skew_seconds` off."""

    def __init__(self, seed: int, name: str, *, skew_seconds: float = 0.0) -> None:
        self.random = source(seed, "world", name)
        self._secrets = source(seed, "secrets", name)
        self._skew_seconds = skew_seconds

    def now(self) -> float:
        return trio.current_time()

    def wall_time(self) -> float:
        return EPOCH + trio.current_time() + self._skew_seconds

    def correct_clock(self, seconds: float) -> None:
        self._skew_seconds += seconds

    def secret_bytes(self, count: int) -> bytes:
        """Seeded bytes: a simulation has no secrets."""
        return self._secrets.randbytes(count)


T = TypeVar("T")
Action = Callable[..., object]

_NAMED, _LINK = 0, 1

TASKS_NAMED_MAX = 20

GARBAGE_THRESHOLDS = (200_000, 20, 200)
"""Of the garbage collector: the default (700, 10, 10) would scan millions of objects often."""


class Deadlock(SwarmError):
    """Every task waits and no deadline is set, so no task can ever run again."""


class Timeline:
    """Actions ordered by (time, name or link, number), never by chance: each name and link must
    number its own actions in ascending order."""

    def __init__(self) -> None:
        # (time, _NAMED or _LINK, name or link, number, action, arguments)
        self._heap: list[tuple[float, int, Any, int, Action, tuple[Any, ...]]] = []

    def at(self, time: float, name: str, number: int, action: Action, *args: Any) -> None:
        """Call `action(*args)` at `time`, or as soon as no task can run if that is past."""
        heapq.heappush(self._heap, (time, _NAMED, name, number, action, args))

    def at_link(self, time: float, link: int, number: int, action: Action, *args: Any) -> None:
        """`at` for a link of the network; at equal times links come after names."""
        heapq.heappush(self._heap, (time, _LINK, link, number, action, args))

    def next_time(self) -> float:
        """Time of the next action; inf when there is none."""
        return self._heap[0][0] if self._heap else inf

    def do_due(self, now: float) -> None:
        """Run due actions, outside any task: actions wake tasks, start them, and never wait."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, _, _, _, action, args = heapq.heappop(heap)
            action(*args)

    async def run(self) -> None:
        """Let the simulation's clock run due actions, until cancelled."""
        clock = virtual_clock()
        if clock.timeline is not None:
            raise RuntimeError("this simulation has a timeline already")
        clock.timeline = self
        try:
            await trio.sleep_forever()
        finally:
            clock.timeline = None


class VirtualClock(trio.abc.Clock):
    """Virtual seconds from 0, and the timeline, whose actions run between trio's turns."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        """`give_up` is called once, at a deadlock or when an action failed."""
        self.now = 0.0
        self.timeline: Timeline | None = None
        self.failure: BaseException | None = None
        """The error that an action of the timeline raised."""
        self._give_up = give_up
        self._runner: Any = None

    def start_clock(self) -> None:
        self._runner = trio._core._run.GLOBAL_RUN_CONTEXT.runner
        self._runner.io_manager = _SeldomAsked(self._runner.io_manager)

    def current_time(self) -> float:
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Advance time until a task can run, or to `deadline`. Returns 0, except when
        `wait_all_tasks_blocked` waits: then time stands still."""
        runner = self._runner
        while True:
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


class _SeldomAsked:
    """trio's I/O, asked for events at one of `TURNS` turns: a simulation has none but Ctrl-C, and
    each time takes a system call."""

    TURNS = 64

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._turn = 0
        self.process_events = manager.process_events

    def get_events(self, timeout: float) -> Any:
        self._turn += 1
        if timeout <= 0.0 and self._turn % self.TURNS:
            return ()
        return self._manager.get_events(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def virtual_clock() -> VirtualClock:
    """The clock of the running simulation; raises `RuntimeError` outside `run_virtual`."""
    clock = trio.lowlevel.current_clock()
    if not isinstance(clock, VirtualClock):
        raise RuntimeError("this runs in virtual time only: use simnet.clock.run_virtual")
    return clock


def run_virtual(
    main: Callable[..., Awaitable[T]], *args: Any, seed: int, limit_seconds: float = inf
) -> T:
    """Run `trio.run(main, *args)` in virtual time from 0. Raises `Deadlock` when no task can run
    again, and `trio.TooSlowError` after `limit_seconds` of virtual time."""
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
    """The simulation's waiting tasks: the main task, then the tasks without children, sorted by
    name, each with the line where it waits."""
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
