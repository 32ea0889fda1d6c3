"""A network of trainers in one process, which averages like the libraries: for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import trio
from torch import Tensor

from peers.outer.learning.contribution import Contribution, write_values
from peers.outer.learning.tensor_file import Shapes
from swarm.jobs.averaging import AverageRound, AveragingService, Exchanged, Meet


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def write(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)


@dataclass
class Meeting:
    """Averages once `trainers` updates of a round have come."""

    trainers: int
    updates: dict[int, list[AverageRound]] = field(default_factory=dict)
    averages: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    state: tuple[int, bytes] = (-1, b"")
    """The newest state that a trainer has begun a round from, and its round."""
    changed: trio.Condition = field(default_factory=trio.Condition)


class InProcess:
    """Implements `AveragingService`. A trainer that is behind gets the state and the average."""

    def __init__(self, meeting: Meeting, shapes: Shapes) -> None:
        self._meeting = meeting
        self._shapes = shapes

    async def open(self) -> list[str]:
        return ["here"]

    async def meet(self, job: Meet) -> Exchanged:
        round_, state = self._meeting.state
        if round_ <= job.round:
            return Exchanged(round=job.round)
        write(job.received, state)
        return Exchanged(round=round_, received=True)

    async def average(self, job: AverageRound) -> Exchanged:
        meeting = self._meeting
        async with meeting.changed:
            given = meeting.updates.setdefault(job.round, [])
            if job.round not in meeting.averages:
                given.append(job)
            meeting.state = max(meeting.state, (job.round - 1, read(job.state)))
            if job.round not in meeting.averages and len(given) == meeting.trainers:
                tokens = sum(each.tokens for each in given)
                mean = torch.zeros(())
                for each in given:
                    with Contribution(Path(each.update), self._shapes) as update:
                        mean = mean + update.values() * (each.tokens / tokens)
                meeting.averages[job.round] = (mean, tokens)
                meeting.changed.notify_all()
            while job.round not in meeting.averages:
                await meeting.changed.wait()
        average, tokens = meeting.averages[job.round]
        write_values(average, self._shapes, Path(job.average))
        return Exchanged(round=job.round, trainers=len(given), tokens=tokens, averaged=True)

    async def end(self) -> None:
        """Costs nothing."""


_SERVICE: type[AveragingService] = InProcess
