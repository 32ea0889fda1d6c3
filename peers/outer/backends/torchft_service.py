"""Averaging by torchft: a lighthouse forms quorums of trainers, which all-reduce over Gloo.

Imports torchft, so it runs in a child under torchft's own environment. A trainer that comes, or
that missed a round, gets the state of another one at the next quorum (torchft's live recovery),
contributes nothing there, and takes the same step as the others.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp
from torchft import Manager, ProcessGroupGloo

from peers.outer.backends import files
from swarm.errors import UserError
from swarm.jobs.averaging import (
    AverageRound,
    AveragingOpened,
    AveragingSetup,
    EndAveraging,
    Exchanged,
    Meet,
    OpenAveraging,
)
from swarm.jobs.training import Done
from swarm.world.job_thread import JobThread, in_job_thread
from swarm.world.progress import checkpoint

CONNECT_SECONDS = 20.0
"""Time to reach the lighthouse, or another trainer."""

STALLED_SECONDS = 30.0
"""Silence in an all-reduce, or a recovery, after which it is given up."""

QUORUM_SECONDS = 1500.0
"""Longest wait for a quorum. The lighthouse decides how long it waits for stragglers."""

_EXTRA = 2
"""Values behind the update: the tokens, and 1 for each trainer that contributes."""


class TorchftService:
    """Implements `AveragingService`."""

    def __init__(self, setup: AveragingSetup) -> None:
        """Reach the lighthouse; raises `UserError` if there is none."""
        torch.set_num_threads(1)
        (self._lighthouse,) = setup.join
        self._setup = setup
        self._thread = JobThread()
        self._shared: tuple[int, Tensor] = (0, torch.empty(0, dtype=torch.uint8))
        self._recovered: dict[str, Any] | None = None
        try:
            self._store: Any = distributed.TCPStore(  # type: ignore[attr-defined]
                setup.host, setup.port, is_master=True, wait_for_workers=False
            )
            self._manager = Manager(
                pg=ProcessGroupGloo(timeout=timedelta(seconds=STALLED_SECONDS)),
                load_state_dict=self._recover,
                state_dict=self._state,
                min_replica_size=1,
                timeout=timedelta(seconds=STALLED_SECONDS),
                quorum_timeout=timedelta(seconds=QUORUM_SECONDS),
                connect_timeout=timedelta(seconds=CONNECT_SECONDS),
                rank=0,
                world_size=1,
                store_addr=setup.host,
                store_port=self._store.port,
                lighthouse_addr=self._lighthouse,
                hostname=setup.host,
            )
        except Exception as error:
            raise UserError(
                f"torchft's lighthouse at {self._lighthouse} cannot be reached from {setup.host} "
                f"({_short(error)}); start torchft_lighthouse, or correct --join"
            ) from error

    async def open(self, job: OpenAveraging) -> AveragingOpened:
        """See `AveragingService.open`; trainers join at the lighthouse."""
        return AveragingOpened()

    @in_job_thread
    def meet(self, job: Meet) -> Exchanged:
        """See `AveragingService.meet`."""
        self._shared = job.round, files.read_state(job.state, self._setup.state_bytes)
        nothing = torch.zeros(self._setup.elements + _EXTRA)
        # Whoever joins a round of others takes part in it, with the state before and nothing else.
        return self._exchange(nothing, job.round, job.received, job.average)

    @in_job_thread
    def average(self, job: AverageRound) -> Exchanged:
        """See `AveragingService.average`."""
        self._shared = job.round - 1, files.read_state(job.state, self._setup.state_bytes)
        update = files.read_update(job.update, self._setup.elements)
        given = torch.cat([update * job.tokens, torch.tensor([float(job.tokens), 1.0])])
        return self._exchange(given, job.round - 1, job.received, job.average)

    @in_job_thread
    def end(self, job: EndAveraging) -> Done:
        self._manager.shutdown(wait=False)
        return Done()

    def _exchange(self, given: Tensor, done: int, received: str, average: str) -> Exchanged:
        attempts = 0
        deadline = time.monotonic() + QUORUM_SECONDS
        while True:
            checkpoint()
            attempts += 1
            self._recovered = None
            values = given.clone()
            self._quorum()
            self._manager.allreduce(values, reduce_op=ReduceOp.SUM).wait()
            if self._manager.should_commit():
                break
            if time.monotonic() > deadline:
                raise UserError(
                    f"torchft could not average within {QUORUM_SECONDS:g} s and {attempts} "
                    "attempts; look at the network between the trainers, then use --resume"
                )
        if self._recovered is not None:
            done = self._take(received)
        tokens, trainers = values[-_EXTRA].item(), round(values[-1].item())
        if trainers:
            files.write(average, values[:-_EXTRA] / tokens)
        return Exchanged(
            round=done + bool(trainers),
            trainers=max(1, trainers),
            tokens=round(tokens),
            averaged=bool(trainers),
            received=self._recovered is not None,
            attempts=attempts,
        )

    def _quorum(self) -> None:
        try:
            self._manager.start_quorum()
            self._manager.wait_quorum()
        except Exception as error:
            raise UserError(
                f"torchft's lighthouse at {self._lighthouse} forms no quorum "
                f"({_short(error)}); start it again, then this trainer with --resume"
            ) from error

    # --- state -------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        round_, state = self._shared
        return {"round": round_, "state": state}

    def _recover(self, state: dict[str, Any]) -> None:
        self._recovered = state

    def _take(self, path: str) -> int:
        """Write the state that another trainer sent; return its round."""
        assert self._recovered is not None
        round_, state = self._recovered.get("round"), self._recovered.get("state")
        if not isinstance(round_, int) or not files.is_state(state, self._setup.state_bytes):
            raise UserError(
                f"another trainer at {self._lighthouse} trains another model; give each "
                "training a lighthouse of its own"
            )
        assert isinstance(state, Tensor)
        files.write(path, state)
        return round_


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
