"""Averaging by hivemind: a DHT finds the trainers, and groups of them all-reduce.

Imports hivemind, so it runs in a child under hivemind's own environment. Trainers of different
rounds never meet: the round is part of the key under which a group forms. Each trainer announces in
the DHT which round it has completed; one that is behind downloads the state of one that is not.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.partition import AllreduceException
from hivemind.dht import DHT
from torch import Tensor

from peers.outer.learning.contribution import Contribution, write_values
from swarm.errors import UserError
from swarm.jobs.averaging import AverageRound, AveragingSetup, Exchanged, Meet
from swarm.world.progress import checkpoint
from swarm.world.tasks import JobThread, in_job_thread

PRESENT_SECONDS = 10.0
"""A trainer announces itself this often, and counts as gone this long after its last word."""

GROUP_SECONDS = 5.0
"""Longest time that a group waits for further trainers before it averages without them."""

STALLED_SECONDS = 10.0
"""Silence in an all-reduce after which a member counts as failed."""

FAREWELL_SECONDS = 3.0
"""Time that a trainer stays after its last round."""

STATE_SECONDS = 300.0
"""Longest time for the download of a state."""

LOOK_SECONDS = 0.25
"""Pause between two looks into the DHT."""

ROUND_BITS = 32
"""Bits of the key of a group."""


class _Dht(DHT):  # type: ignore[misc]
    """A DHT whose process, and the daemon that it starts, die with this one, however that ends."""

    def run(self) -> None:
        if os.getpgrp() == os.getppid():  # the child leads the group
            parent = os.pidfd_open(os.getppid())
            threading.Thread(target=_end_with, args=[parent], daemon=True).start()
        super().run()


def _end_with(pidfd: int) -> None:
    """Kill this process's group when a process ends."""
    select.select([pidfd], [], [])
    os.killpg(0, signal.SIGKILL)


class _Averager(DecentralizedAverager):  # type: ignore[misc]
    """Shares the state of this trainer besides averaging."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.shared: tuple[int, Tensor] | None = None
        """The last complete round, and the state after it."""
        super().__init__(*arguments, **named)

    async def _run_allreduce_inplace_(
        self,
        tensors: Sequence[Tensor],
        group_info: Any,
        group_id: bytes | None = None,
        **named: Any,
    ) -> None:
        """All-reduce, or raise: the library keeps each trainer's own values of the parts that a
        member which died should have averaged, so that replicas would differ."""
        await super()._run_allreduce_inplace_(tensors, group_info, group_id, **named)
        running = self._running_groups[group_info.group_id if group_id is None else group_id]
        runner = running.result()
        if runner.banned_senders or runner.tensor_part_container.failed_size:
            raise AllreduceException("a member of the group died")

    def get_current_state(self) -> tuple[Any, Sequence[Tensor], None]:
        """What another trainer gets that asks for this one's state."""
        if self.shared is None:
            return {"round": -1}, [], None
        round_, state = self.shared
        return {"round": round_}, [state], None


class HivemindService:
    """Implements `AveragingService`."""

    def __init__(self, setup: AveragingSetup) -> None:
        """Start the DHT and the averager; raises `UserError` if no initial peer can be reached."""
        self._setup = setup
        self._thread = JobThread()
        torch.set_num_threads(1)
        try:
            self._dht = _Dht(
                initial_peers=list(setup.join),
                host_maddrs=[f"/ip4/{setup.host}/tcp/{setup.port}"],
                start=True,
                startup_timeout=30,
                cache_locally=False,
                cache_nearest=0,
            )
        except Exception as error:
            raise UserError(
                f"hivemind's DHT does not start with the peers {list(setup.join) or 'none'} "
                f"({error}); check --join, and that {setup.host} is an address of this machine"
            ) from error
        self._values = torch.zeros(sum(map(prod, setup.shapes.values())))
        self._averager = _Averager(
            [self._values],
            self._dht,
            prefix=f"swarm_{setup.run}",
            target_group_size=max(2, setup.trainers),
            initial_group_bits=_bits(0),
            min_matchmaking_time=GROUP_SECONDS,
            request_timeout=3.0,
            next_chunk_timeout=STALLED_SECONDS,
            allreduce_timeout=None,
            declare_state_period=PRESENT_SECONDS,
            allow_state_sharing=False,
            start=True,
        )

    async def open(self) -> list[str]:
        """See `AveragingService.open`."""
        return [str(each) for each in self._dht.get_visible_maddrs()]

    @in_job_thread
    def meet(self, job: Meet) -> Exchanged:
        """See `AveragingService.meet`."""
        self._share(job.round, job.state)
        deadline = time.monotonic() + self._setup.wait_seconds
        while True:
            others = self._others()
            if others and max(others) > job.round and (met := self._receive(job)) is not None:
                return Exchanged(round=met, trainers=1 + len(others), received=True)
            if len(others) + 1 >= self._setup.trainers or time.monotonic() > deadline:
                return Exchanged(round=job.round, trainers=1 + len(others))
            _pause()

    @in_job_thread
    def average(self, job: AverageRound) -> Exchanged:
        """See `AveragingService.average`."""
        self._share(job.round - 1, job.state)
        deadline = time.monotonic() + self._setup.wait_seconds
        attempts = 0
        while True:
            checkpoint()
            others = self._others()
            if others and max(others) >= job.round and (met := self._receive(job)) is not None:
                return Exchanged(round=met, received=True, attempts=max(1, attempts))
            if not others or time.monotonic() > deadline:
                break
            attempts += 1
            weights = self._step(job)
            if weights is not None:
                with self._averager.get_tensors() as (values,):
                    write_values(values.detach(), self._setup.shapes, Path(job.average))
                return Exchanged(
                    round=job.round,
                    trainers=len(weights),
                    tokens=sum(weights),
                    averaged=True,
                    attempts=attempts,
                )
        shutil.copyfile(job.update, job.average)
        return Exchanged(
            round=job.round, tokens=job.tokens, averaged=True, attempts=max(1, attempts)
        )

    async def end(self) -> None:
        """Stay a moment, for the others may still fetch this trainer's part of the average."""
        await trio.sleep(FAREWELL_SECONDS)
        self._averager.shutdown()
        self._dht.shutdown()

    def _step(self, job: AverageRound) -> list[int] | None:
        """Try once to average with others; return the members' tokens, or None."""
        with (
            Contribution(Path(job.update), self._setup.shapes) as update,
            self._averager.get_tensors() as (values,),  # a failed attempt has changed them
        ):
            values.copy_(update.values())
        self._averager.set_group_bits(_bits(job.round))
        try:
            control = self._averager.step(
                gather={"tokens": job.tokens},
                weight=float(job.tokens),
                timeout=GROUP_SECONDS * 2,
                allow_retries=False,
                wait=False,
            )
            while not control.done():
                checkpoint()
                time.sleep(0.01)
            gathered = control.result()
        except Exception:  # no group was found, or it fell apart; the library has logged why
            return None
        return [int(each["tokens"]) for each in gathered.values()]

    # --- state -------------------------------------------------------------------------------

    def _share(self, round_: int, path: str) -> None:
        """Offer the state after a round to trainers that come later, and announce the round."""
        self._averager.shared = (round_, torch.from_numpy(np.fromfile(path, "u1")))
        self._averager.state_sharing_priority = float(round_ + 1)
        self._averager.allow_state_sharing = True

    def _others(self) -> list[int]:
        """The last complete rounds of the other trainers that are present."""
        found = self._dht.get(f"{self._averager.prefix}.all_averagers", latest=True)
        if found is None or not isinstance(found.value, dict):
            return []
        own = self._averager.peer_id.to_bytes()
        return [
            int(each.value) - 1
            for peer, each in found.value.items()
            if peer != own and isinstance(each.value, float)
        ]

    def _receive(self, job: Meet | AverageRound) -> int | None:
        """Download the state of the trainer that is furthest; return its round."""
        loaded = self._averager.load_state_from_peers(timeout=STATE_SECONDS)
        if loaded is None:
            return None
        metadata, tensors = loaded
        round_ = metadata.get("round") if isinstance(metadata, dict) else None
        if not isinstance(round_, int) or round_ < job.round or len(tensors) != 1:
            return None
        if not _is_state(tensors[0], self._setup.state_bytes):
            return None
        tensors[0].numpy().tofile(job.received)
        return round_


def _pause() -> None:
    """Pause between two looks into the DHT, which tells nobody of news."""
    checkpoint()
    time.sleep(LOOK_SECONDS)


def _bits(round_: int) -> str:
    return format(round_ % (1 << ROUND_BITS), f"0{ROUND_BITS}b")


def _is_state(values: object, size_bytes: int) -> bool:
    """Whether another trainer's tensor can be the file of a state of this model."""
    return (
        isinstance(values, Tensor)
        and values.dtype == torch.uint8
        and tuple(values.shape) == (size_bytes,)
    )
