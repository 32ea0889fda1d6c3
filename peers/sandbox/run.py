"""The sandbox as its users call it: any number of threads, a bounded number of programs."""

from __future__ import annotations

import os
import threading
from functools import cache

from peers.sandbox.isolation import Isolation
from peers.sandbox.launcher import execute_here_or_there
from peers.sandbox.probe import probe
from peers.sandbox.program import Limits, Outcome, Program
from swarm.errors import UserError


class Sandbox:
    """Runs programs by one means, at most `parallel` at a time."""

    def __init__(self, parallel: int | None = None, means: Isolation | None = None) -> None:
        """`parallel` defaults to the number of processors.

        Raises `UserError` where no means of isolation works.
        """
        parallel = parallel if parallel is not None else os.cpu_count() or 1
        if parallel < 1:
            raise UserError(f"parallel is {parallel}; run at least 1 program at a time")
        self.parallel = parallel
        self.means: Isolation = means if means is not None else probe().best()
        self._free = threading.BoundedSemaphore(parallel)

    def run(self, program: Program, limits: Limits = Limits()) -> Outcome:  # noqa: B008
        """Run a program to its end, after others if too many run already.

        Raises `SandboxError` when the program cannot be started.
        """
        with self._free:
            return execute_here_or_there(self.means, program, limits)


@cache
def _shared() -> Sandbox:
    return Sandbox()


def run(program: Program, limits: Limits = Limits()) -> Outcome:  # noqa: B008
    """Run a program in the sandbox that all callers in this process share; see `Sandbox.run`."""
    return _shared().run(program, limits)
