"""A child service that tests start: it answers, fails, stalls, hogs and dies on request."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from swarm.errors import UserError


class Service:
    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting

    def greet(self, name: str) -> dict[str, str]:
        return {"text": f"{self.greeting} {name}"}

    def pid(self) -> dict[str, int]:
        return {"pid": os.getpid()}

    def fail(self) -> dict[str, str]:
        raise ValueError("on purpose")

    def mistake(self) -> dict[str, str]:
        raise UserError("the person can put it right")

    def stall(self) -> dict[str, str]:
        print("stalling", file=sys.stderr)
        time.sleep(600)
        return {}

    def hog(self, size_bytes: int) -> dict[str, int]:
        return {"size": len(b"x" * size_bytes)}

    def die(self) -> dict[str, str]:
        print("these are my last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def mutter_and_die(self) -> dict[str, str]:
        print("said on stdout")
        print("\x1b[2Jan unfinished line", end="", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def say(self, lines: int) -> dict[str, str]:
        for line in range(lines):
            print(f"line {line}", file=sys.stderr)
        return {}

    def surroundings(self) -> dict[str, Any]:
        return {
            "folder": str(Path.cwd()),
            "for_tests": os.environ.get("SWARM_FOR_TESTS"),
            "openmp_threads": os.environ["OMP_NUM_THREADS"],
            "session_leader": os.getsid(0) == os.getpid(),
            "threads": len(list(Path("/proc/self/task").iterdir())),
        }

    def draw(self) -> dict[str, float]:
        import numpy

        return {"random": random.random(), "numpy": float(numpy.random.random())}

    def outstay(self) -> dict[str, str]:
        threading.Thread(target=time.sleep, args=(600,)).start()
        return {}

    def answer_with(self, raw: bytes) -> dict[str, str]:
        """What code that has taken over a parser could write to its owner."""
        (connection,) = [
            int(link.name)
            for link in Path("/proc/self/fd").iterdir()
            if link.is_symlink() and str(link.readlink()).startswith("socket:")
        ]
        os.write(connection, raw)
        time.sleep(600)
        return {}


class Unmakeable:
    def __init__(self) -> None:
        raise RuntimeError("no such engine")
