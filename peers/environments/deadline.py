"""A time limit for calls of an environment's code, which may never return.

A watching thread raises an exception in the thread whose call is overdue. That ends Python code,
but neither a blocking system call nor a library that keeps the interpreter busy: then the process
ends with the sentence as its last words, and its owner starts another.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarm.errors import UserError
from swarm.world.progress import HUNG_STATUS, Reporter, current

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
    traced (by coverage, a debugger, hypothesis) waits at its next function without end.
    """
    error = ctypes.py_object(_OverdueError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


limited = _Watch().limited
"""Limit the time of the block, in seconds; raises `UserError` with the sentence."""
