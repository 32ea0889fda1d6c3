"""A child service that tests start: it answers, fails, stalls, hogs and dies on request."""

from __future__ import annotations

import os
import signal
import sys
import time


class Service:
    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting

    def greet(self, name: str) -> dict[str, str]:
        return {"text": f"{self.greeting} {name}"}

    def pid(self) -> dict[str, int]:
        return {"pid": os.getpid()}

    def fail(self) -> dict[str, str]:
        raise ValueError("on purpose")

    def stall(self) -> dict[str, str]:
        time.sleep(600)
        return {}

    def hog(self, size_bytes: int) -> dict[str, int]:
        return {"size": len(b"x" * size_bytes)}

    def die(self) -> dict[str, str]:
        print("these are my last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return {}


class Unmakeable:
    def __init__(self) -> None:
        raise RuntimeError("no such engine")
