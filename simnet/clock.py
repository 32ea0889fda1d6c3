"""Runs a trio program in virtual time, the same way every time for one seed.

Time jumps to the next deadline whenever every task waits; nothing here waits for real. trio
shuffles the tasks of each scheduling step; with its deterministic scheduling on, the order is
drawn from a generator that is seeded here, over tasks sorted by age. These names of trio are
private: trio is pinned, and `check_trio` says clearly when another version lacks them.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import trio
import trio.testing

from simnet.seeded import source
from swarm.errors import SwarmError

T = TypeVar("T")

TASKS_NAMED_MAX = 20
"""Waiting tasks named by `Deadlock`."""


class Deadlock(SwarmError):
    """Every task waits and no deadline is set, so nothing can ever happen again."""


class TrioChanged(SwarmError):
    """This version of trio lacks a private name that simulations need."""


def check_trio() -> None:
    """Raise `TrioChanged` naming what this trio lacks. Called by every run."""
    run = trio._core._run
    wanted: list[tuple[Any, str]] = [
        (run, "_ALLOW_DETERMINISTIC_SCHEDULING"),
        (run, "_r"),
        (trio.testing.MockClock(), "_autojump"),
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
    clock = trio.testing.MockClock(autojump_threshold=0)
    scope = trio.CancelScope()
    stuck: list[str] = []
    jump = clock._autojump

    def jump_or_give_up() -> None:
        if trio.lowlevel.current_statistics().seconds_to_next_deadline == inf and not stuck:
            stuck.extend(_waiting_tasks())
            scope.cancel()
        else:
            jump()

    clock._autojump = jump_or_give_up  # type: ignore[method-assign]

    async def bounded() -> T:
        with scope:
            if limit_seconds == inf:
                return await main(*args)
            with trio.fail_after(limit_seconds):
                return await main(*args)
        raise Deadlock(f"nothing can ever happen again; waiting: {', '.join(stuck)}")

    run: Any = trio._core._run
    run._r.seed(source(seed, "scheduling").getrandbits(64))
    before = run._ALLOW_DETERMINISTIC_SCHEDULING
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    try:
        return trio.run(bounded, clock=clock)
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = before


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
            leaves.append(f"{task.name} ({_place(task)})")
        todo += children
    leaves.sort()
    if len(leaves) > TASKS_NAMED_MAX:
        leaves[TASKS_NAMED_MAX:] = [f"and {len(leaves) - TASKS_NAMED_MAX} more"]
    return ([f"the main task ({_place(main)})"] if main is not None else []) + leaves


def _children(task: trio.lowlevel.Task) -> list[trio.lowlevel.Task]:
    return [child for nursery in task.child_nurseries for child in nursery.child_tasks]


def _place(task: trio.lowlevel.Task) -> str:
    """`function, file:line` of the innermost frame of a waiting task outside trio."""
    place = "not begun"
    for frame, line in task.iter_await_frames():
        if f"{os.sep}trio{os.sep}" not in frame.f_code.co_filename:
            path = Path(frame.f_code.co_filename)
            place = f"{frame.f_code.co_name}, {path.parent.name}/{path.name}:{line}"
    return place
