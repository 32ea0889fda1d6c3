"""The progress of a running simulation, in a line on stderr every few seconds.

It is a trio instrument, called at scheduler passes, and reads the machine's clock only there. The
simulation never sees that clock, so its trace is the same with and without.
"""

from __future__ import annotations

import sys
import time

import trio

from simnet.simulation import Simulation
from swarm.terminal.figures import readable_seconds

PASSES_BETWEEN_LOOKS = 64
"""Scheduler passes between two readings of the machine's clock: some milliseconds."""

LINE_SECONDS = 5.0


class Progress(trio.abc.Instrument):
    """Prints the progress of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._passes = 0
        self._last = (time.monotonic(), 0.0)
        """(machine's time, virtual time) of the last line."""

    def after_io_wait(self, timeout: float) -> None:
        self._passes += 1
        if self._passes % PASSES_BETWEEN_LOOKS:
            return
        now, virtual = time.monotonic(), trio.current_time()
        since, virtual_since = self._last
        if now - since >= LINE_SECONDS:
            self._last = now, virtual
            speed = (virtual - virtual_since) / max(1e-9, now - since)
            simulation = self._simulation
            print(
                f"{readable_virtual(virtual)} virtual  {simulation.trace.events:,} events  "
                f"{simulation.network.messages:,} messages  {readable_speed(speed)} real time",
                file=sys.stderr,
                flush=True,
            )


def readable_virtual(seconds: float) -> str:
    """`7.3 s`, `3:07`, `2:14:09`."""
    return f"{seconds:.1f} s" if seconds < 60 else readable_seconds(seconds)


def readable_speed(speed: float) -> str:
    """`0.85 ×`, `12 ×`, `1,204 ×`."""
    return f"{speed:.2f} ×" if speed < 9.95 else f"{speed:,.0f} ×"
