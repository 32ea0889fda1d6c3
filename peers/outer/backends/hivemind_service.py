"""Averaging by hivemind: a DHT finds the trainers, and groups of them all-reduce.

Imports hivemind, so it runs in a child under hivemind's own environment. Trainers of different
rounds never meet: the round is part of the key under which a group forms. Each trainer announces in
the DHT which round it has completed; one that is behind downloads the state of one that is not.

A trainer that dies in an all-reduce may have sent its part to some members only. So an average
counts when every member of its group has told the others, in the DHT, that it has all of it, and
when the group was more than half of the trainers present: no other group has averaged that round.
Otherwise all of them average once more. One whose votes got lost takes the average from those that
have it. Not defended: a network that falls apart just as the votes are counted."""

import asyncio
import multiprocessing
import os
import random
import select
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
import trio
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.averaging.partition import AllreduceException
from hivemind.dht import DHT
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time
from torch import Tensor

from peers.outer.backends.hivemind_network import enclose, key_file
from peers.outer.learning.contribution import Contribution, write_values
from swarm.errors import UserError
from swarm.jobs.averaging import AverageRound, AveragingSetup, Exchanged, Meet
from swarm.wire.identity import Identity
from swarm.world.progress import checkpoint
from swarm.world.tasks import JobThread, in_job_thread

PRESENT_SECONDS = 10.0
"""A trainer counts as gone this long after its last word; it speaks three times as often."""

GROUP_SECONDS = 5.0
"""Longest time that a group waits for further trainers before it averages without them."""

STALLED_SECONDS = 10.0
"""Silence in an all-reduce after which a member counts as failed."""

VOTE_SECONDS = 3 * STALLED_SECONDS
"""Longest wait for the votes of a group; the library waits for an average twice as long as for a
part of one, so that members notice a death up to `STALLED_SECONDS` apart."""

VOTES_SECONDS = 600.0
"""Votes can be read this long."""

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
        self.shared: tuple[int, list[Tensor]] | None = None
        """The last complete round, and the state after it, or the state before and the average."""
        super().__init__(*arguments, **named)

    async def _declare_for_download_periodically(self) -> None:
        async def remind() -> None:  # or else each announcement would end before the next
            while True:
                await asyncio.sleep(PRESENT_SECONDS / 3)
                self._state_updated.set()

        self._reminder = asyncio.create_task(remind())
        await super()._declare_for_download_periodically()

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
        round_, tensors = self.shared
        return {"round": round_}, tensors, None


class HivemindService:
    """Implements `AveragingService`."""

    averager: ClassVar[type[_Averager]] = _Averager

    def __init__(self, setup: AveragingSetup) -> None:
        """Start the DHT and the averager; raises `UserError` if no initial peer can be reached."""
        self._setup = setup
        self._thread = JobThread()
        torch.set_num_threads(1)
        self._traffic = multiprocessing.Array("q", 2)
        enclose(
            frozenset(PeerID.from_base58(each).to_bytes() for each in setup.members), self._traffic
        )
        try:
            with key_file(Identity(setup.seed)) as identity:
                self._dht = _Dht(
                    initial_peers=list(setup.join),
                    host_maddrs=[f"/ip4/{setup.host}/tcp/{setup.port}"],
                    identity_path=identity,
                    check_if_identity_free=False,  # it knows RSA keys only
                    auto_nat=False,
                    nat_port_map=False,
                    use_relay=False,
                    start=True,
                    startup_timeout=30,
                    cache_locally=False,
                    cache_nearest=0,
                )
        except Exception as error:
            raise UserError(
                f"hivemind's DHT does not start with the peers {list(setup.join) or 'none'} "
                f"({error}); check --join, that {setup.host} is an address of this machine, and "
                "that --key-file, --name and --trainers are those of the others"
            ) from error
        self._values = torch.zeros(sum(map(prod, setup.shapes.values())))
        self._averager = self.averager(
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
        self._share(job.round, [_state(job.state)])
        deadline = time.monotonic() + self._setup.wait_seconds
        while True:
            others = self._others()
            if others and max(others) > job.round and (met := self._receive(job)) is not None:
                return met
            if len(others) + 1 >= self._setup.trainers or time.monotonic() > deadline:
                return Exchanged(round=job.round, trainers=1 + len(others))
            _pause()

    @in_job_thread
    def average(self, job: AverageRound) -> Exchanged:
        """See `AveragingService.average`."""
        found = self._average(job)
        sent, received = self._traffic[:]
        return msgspec.structs.replace(found, bytes_sent=sent, bytes_received=received)

    def _average(self, job: AverageRound) -> Exchanged:
        state = _state(job.state)
        self._share(job.round - 1, [state])
        deadline = time.monotonic() + self._setup.wait_seconds
        attempts = 0
        while True:
            checkpoint()
            others = self._others()
            if others and max(others) >= job.round and (met := self._receive(job)) is not None:
                return msgspec.structs.replace(met, attempts=max(1, attempts))
            if not others or time.monotonic() > deadline:
                break
            begun, tokens = time.monotonic(), self._step(job)
            if tokens is None:
                continue
            attempts += 1
            if tokens:
                with self._averager.get_tensors() as (values,):
                    average = values.detach().clone()
                self._share(job.round, [state, average])
                write_values(average, self._setup.shapes, Path(job.average))
                return Exchanged(
                    round=job.round,
                    trainers=len(tokens),
                    tokens=sum(tokens),
                    averaged=True,
                    attempts=attempts,
                )
            if attempts <= self._setup.trainers:  # a death is no reason to go on alone
                deadline += time.monotonic() - begun
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
        """Try once to average: the members' tokens, none if that failed, None without a group."""
        with (
            Contribution(Path(job.update), self._setup.shapes) as update,
            self._averager.get_tensors() as (values,),  # a failed attempt has changed them
        ):
            values.copy_(update.values())
        self._averager.set_group_bits(_bits(job.round))
        attempt, formed = random.getrandbits(60) + 1, False
        try:
            control = self._averager.step(
                gather={"tokens": job.tokens, "attempt": attempt},
                weight=float(job.tokens),
                timeout=GROUP_SECONDS * 2,
                allow_retries=False,
                wait=False,
            )
            while not control.done():
                formed = formed or control.stage is AveragingStage.RUNNING_ALLREDUCE
                checkpoint()
                time.sleep(0.01)
            gathered = control.result()
        except Exception:  # no group was found, or it fell apart; the library has logged why
            self._vote(job.round, -attempt)
            return [] if formed else None
        attempts = {peer.to_bytes(): int(each["attempt"]) for peer, each in gathered.items()}
        whole = self._agree(job.round, attempt, attempts)
        return [int(each["tokens"]) for each in gathered.values()] if whole else []

    def _agree(self, round_: int, own: int, attempts: dict[bytes, int]) -> bool:
        """Whether every member of the group has the whole average; tell them of this one."""
        if 2 * len(attempts) > 1 + len(self._others()):
            self._vote(round_, own)
            deadline = time.monotonic() + VOTE_SECONDS
            while time.monotonic() < deadline:
                votes = self._read(f"votes_{round_}")
                given = [votes.get(peer) for peer in attempts]
                if given == list(attempts.values()):
                    return True
                if any(votes.get(peer) == -attempt for peer, attempt in attempts.items()):
                    break
                _pause()
        self._vote(round_, -own)
        return False

    def _vote(self, round_: int, vote: int) -> None:
        """Tell the others the number of an attempt that gave the average, else its negative."""
        self._dht.store(
            f"{self._averager.prefix}.votes_{round_}",
            subkey=self._averager.peer_id.to_bytes(),
            value=vote,
            expiration_time=get_dht_time() + VOTES_SECONDS,
        )

    def _read(self, name: str) -> dict[bytes, Any]:
        """What each trainer has stored under a name in the DHT, by its id."""
        found = self._dht.get(f"{self._averager.prefix}.{name}", latest=True)
        if found is None or not isinstance(found.value, dict):
            return {}
        return {peer: each.value for peer, each in found.value.items()}

    # --- state -------------------------------------------------------------------------------

    def _share(self, round_: int, tensors: list[Tensor]) -> None:
        """Offer what leads to the state after a round to later trainers, and announce the round."""
        self._averager.shared = (round_, tensors)
        self._averager.state_sharing_priority = float(round_ + 1)
        self._averager.allow_state_sharing = True

    def _others(self) -> list[int]:
        """The last complete rounds of the other trainers that are present."""
        own = self._averager.peer_id.to_bytes()
        return [
            int(value) - 1
            for peer, value in self._read("all_averagers").items()
            if peer != own and isinstance(value, float)
        ]

    def _receive(self, job: Meet | AverageRound) -> Exchanged | None:
        """Download the state of the trainer that is furthest, perhaps with an average to apply."""
        loaded = self._averager.load_state_from_peers(timeout=STATE_SECONDS)
        if loaded is None:
            return None
        metadata, tensors = loaded
        round_ = metadata.get("round") if isinstance(metadata, dict) else None
        if not isinstance(round_, int) or round_ < job.round or len(tensors) not in (1, 2):
            return None
        expected = [(torch.uint8, self._setup.state_bytes), (torch.float32, len(self._values))]
        for tensor, (dtype, size) in zip(tensors, expected, strict=False):
            if tensor.dtype != dtype or tuple(tensor.shape) != (size,):
                return None
        tensors[0].numpy().tofile(job.received)
        for average in tensors[1:]:
            write_values(average, self._setup.shapes, Path(job.average))
        return Exchanged(round=round_, received=True, averaged=len(tensors) == 2)


def _pause() -> None:
    """Pause between two looks into the DHT, which tells nobody of news."""
    checkpoint()
    time.sleep(LOOK_SECONDS)


def _bits(round_: int) -> str:
    return format(round_ % (1 << ROUND_BITS), f"0{ROUND_BITS}b")


def _state(path: str) -> Tensor:
    """The file of a state, as another trainer gets it."""
    return torch.from_numpy(np.fromfile(path, "u1"))
