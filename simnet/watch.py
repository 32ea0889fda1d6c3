"""Observation of a running simulation: a progress line, and Ctrl-C, which ends it cleanly.

Both are a trio instrument, called at scheduler passes, and read the machine's clock only there. The
simulation never sees that clock, so its trace is the same with and without.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from simnet.clock import VirtualClock, virtual_clock
from simnet.simulation import Simulation
from swarm.terminal.figures import readable_seconds

PASSES_BETWEEN_LOOKS = 64
"""Scheduler passes between two readings of the machine's clock: some milliseconds."""

LINE_SECONDS = 0.25
"""Time between two updates of the line on a terminal."""

LOG_SECONDS = 10.0
"""Time between two log lines without a terminal."""

SPEED_SECONDS = 15.0
"""Approximate time over which the shown speed is the mean."""


class Watch(trio.abc.Instrument):
    """Watches one simulation: `with watch.watching(simulation):` inside its trio run.

    `show` draws progress on stderr. Ctrl-C cancels the block and sets `interrupted`; a second
    Ctrl-C ends the program at once.
    """

    def __init__(self, *, show: bool = False, console: Console | None = None) -> None:
        self.interrupted = False
        self._console = console or Console(stderr=True)
        self._show = show
        self._live: Live | None = None
        self._simulation: Simulation | None = None
        self._clock: VirtualClock | None = None
        self._scope = trio.CancelScope()
        self._asked_to_end = False
        self._passes = 0
        self._next_look = 0.0
        self._marks: deque[tuple[float, float]] = deque()
        """(machine's time, virtual time) of the last readings."""

    @contextmanager
    def watching(self, simulation: Simulation) -> Iterator[None]:
        self._simulation = simulation
        self._clock = virtual_clock()
        pause = LINE_SECONDS if self._console.is_terminal else LOG_SECONDS
        self._next_look = time.monotonic() + pause
        self._marks.append((time.monotonic(), trio.current_time()))
        trio.lowlevel.add_instrument(self)
        try:
            with self._handling_interrupts(), self._drawing(), self._scope:
                yield
        finally:
            trio.lowlevel.remove_instrument(self)
        self.interrupted = self._scope.cancelled_caught

    @contextmanager
    def _handling_interrupts(self) -> Iterator[None]:
        """Handle SIGINT inside the block, where possible, and restore its handler afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_interrupt(self, number: int, frame: Any) -> None:
        if self._asked_to_end:
            raise KeyboardInterrupt
        self._asked_to_end = True
        if self._clock is not None:
            self._clock.paused = True  # so that it ends at this moment of virtual time

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        if not (self._show and self._console.is_terminal):
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield
        self._live = None

    # --- on scheduler passes ---

    def after_io_wait(self, timeout: float) -> None:
        if self._asked_to_end:
            self._scope.cancel()
            assert self._clock is not None
            self._clock.paused = False
        self._passes += 1
        if self._passes % PASSES_BETWEEN_LOOKS or not self._show:
            return
        now = time.monotonic()
        if now >= self._next_look:
            self._look(now)

    def _look(self, now: float) -> None:
        simulation = self._simulation
        assert simulation is not None
        virtual = trio.current_time()
        self._marks.append((now, virtual))
        while len(self._marks) > 2 and now - self._marks[0][0] > SPEED_SECONDS:
            self._marks.popleft()
        since, virtual_since = self._marks[0]
        speed = (virtual - virtual_since) / max(1e-9, now - since)
        line = progress_line(simulation, virtual, speed)
        if self._live is not None:
            self._live.update(line, refresh=True)
            self._next_look = now + LINE_SECONDS
        else:
            print(line.plain.strip(), file=sys.stderr, flush=True)
            self._next_look = now + LOG_SECONDS


def progress_line(simulation: Simulation, virtual: float, speed: float) -> Text:
    """Format a simulation's progress; `speed` is virtual seconds per second."""
    dim = "bright_black"
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f" {readable_virtual(virtual)}", style="bold cyan")
    line.append(" virtual  ", style=dim)
    line.append(f"{simulation.trace.events:,}", style="bold")
    line.append(" events  ", style=dim)
    line.append(f"{simulation.network.messages:,}", style="bold")
    line.append(" messages  ", style=dim)
    line.append(readable_speed(speed), style="bold")
    line.append(" real time", style=dim)
    if simulation.ends_at is not None and simulation.ends_at > virtual and speed > 0:
        left = (simulation.ends_at - virtual) / speed
        line.append("  about ", style=dim)
        line.append(readable_seconds(left), style="bold green")
        line.append(" left", style=dim)
    if simulation.violations:
        line.append(f"  {len(simulation.violations)} violations", style="bold red")
    return line


def readable_virtual(seconds: float) -> str:
    """`7.3 s`, `3:07`, `2:14:09`."""
    return f"{seconds:.1f} s" if seconds < 60 else readable_seconds(seconds)


def readable_speed(speed: float) -> str:
    """`0.85 ×`, `12 ×`, `1,204 ×`."""
    return f"{speed:.2f} ×" if speed < 9.95 else f"{speed:,.0f} ×"
