"""The engine's child, which fails in the middle of its first submission."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from peers.engines import finished
from peers.engines import service as engine_service
from peers.engines.engine import Piece, Request
from peers.engines.native import NativeEngine
from swarm.jobs.inference import InferenceSetup

FAILURE = "SWARM_TEST_FAILURE"
"""`die` or `hang`, and the file that the first failure writes, separated by a colon."""

SUBMITTED = "requests.log"
"""File beside that one with a line per request."""


def kept(marker: Path) -> list[Path]:
    """The files of finished rollouts beside the marker."""
    return list(marker.parent.glob("*.finished"))


class FailingEngineService(engine_service.EngineService):
    def __init__(self, setup: InferenceSetup) -> None:
        super().__init__(setup)
        kind, _, path = os.environ[FAILURE].partition(":")
        finished.WRITE_SECONDS = 0.0
        fail(NativeEngine, kind, Path(path))


def fail(engine: type[NativeEngine], kind: str, marker: Path) -> None:
    """Let an engine fail, once, in the step after the first one that finished a request, when that
    is kept."""
    step, submit = engine.step, engine.submit
    some = False

    def failing_step(self: NativeEngine) -> list[Piece]:
        nonlocal some
        if some and not marker.exists():
            size, seen = 0, -1
            while not size or size != seen:  # another thread writes what is finished
                time.sleep(0.02)
                seen, size = size, sum(each.stat().st_size for each in kept(marker))
            marker.touch()
            if kind == "hang":
                time.sleep(600)
            print("kernel fault at 0xdead", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        pieces = step(self)
        some = some or bool(pieces)
        return pieces

    def logged_submit(self: NativeEngine, request: Request) -> None:
        with marker.with_name(SUBMITTED).open("a") as log:
            log.write(f"{marker.exists()}\n")
        submit(self, request)

    engine.step, engine.submit = failing_step, logged_submit  # type: ignore[method-assign]
