"""Cost model of the service of a replica that contributes an RL trainer's policy."""

from __future__ import annotations

import msgspec
import trio
from blake3 import blake3

from simnet.compute.outer import STATE_SHARE, ContributionNotes, OuterModel, StateNotes
from swarm.jobs import merging_exchange as exchange


class SnapshotNotes(msgspec.Struct, frozen=True):
    """The file `snapshot-N` of an exchange folder on the peer's disk."""

    name: str
    """Names the policy's progress since the snapshot before."""
    adopted: int = 0
    problem: str = ""


class AnswerNotes(msgspec.Struct, frozen=True):
    """The file `answer-N`."""

    merged: list[str] = []
    """Names of all contributions in the outer state that the policy adopts."""
    before: list[str] | None = None
    """Of those in the anchor; None: the policy takes the outer state over."""
    sent: str = ""
    """Name of its own contribution, if that counts."""
    trainers: int = 0
    problem: str = ""


class ExchangeModel(OuterModel):
    """Cost model of `peers.outer.learning.exchange_service.ExchangingService`."""

    async def start_exchange(self, job: exchange.StartExchange) -> exchange.ExchangeStarted:
        self._folder = job.exchange
        await self._disk.write(f"{job.exchange}/replica", b"")
        return exchange.ExchangeStarted(
            parameters=self._bytes // 2, contribution_bytes_max=self._bytes + 4096
        )

    async def look_for_snapshot(self, job: exchange.LookForSnapshot) -> exchange.SnapshotSeen:
        names = self._disk.list(self._folder)
        numbers = [int(name[9:]) for name in names if name.startswith("snapshot-")]
        if not numbers:
            return exchange.SnapshotSeen()
        number = max(numbers)
        notes = await self._snapshot(number)
        return exchange.SnapshotSeen(
            number=number,
            adopted=notes.adopted,
            steps=1,
            answered=f"answer-{number}" in names,
            problem=notes.problem,
        )

    async def contribute_snapshot(self, job: exchange.ContributeSnapshot) -> str:
        anchor = await self._read(job.anchor, StateNotes)
        name = (await self._snapshot(job.number)).name
        notes = ContributionNotes(name=blake3(name.encode()).digest(), base=anchor.digest)
        await self._write(job.contribution, notes, "contribution", notes.name, self._bytes)
        return ""

    async def answer_snapshot(self, job: exchange.AnswerSnapshot) -> str:
        state = await self._read(job.state, StateNotes)
        before = (await self._read(job.anchor, StateNotes)).merged if job.anchor else None
        sent = b""
        if job.contribution:
            sent = (await self._read(job.contribution, ContributionNotes)).name
        await self._write(job.keep, state, "state", state.digest, STATE_SHARE * self._bytes)
        await self._answer(
            job.number,
            AnswerNotes(
                merged=[each.hex() for each in state.merged],
                before=[each.hex() for each in before] if before is not None else None,
                sent=sent.hex(),
                trainers=job.trainers,
            ),
        )
        return ""

    async def keep_anchor(self, job: exchange.KeepAnchor) -> None:
        state = await self._read(job.state, StateNotes)
        await self._write(job.keep, state, "state", state.digest, STATE_SHARE * self._bytes)

    async def refuse_snapshot(self, job: exchange.RefuseSnapshot) -> None:
        await self._answer(job.number, AnswerNotes(problem=job.problem))

    async def _answer(self, number: int, notes: AnswerNotes) -> None:
        await trio.sleep(self._bytes / self._disk.bytes_per_second)
        await self._disk.write(f"{self._folder}/answer-{number}", msgspec.msgpack.encode(notes))

    async def _snapshot(self, number: int) -> SnapshotNotes:
        raw = await self._disk.read(f"{self._folder}/snapshot-{number}")
        return msgspec.msgpack.decode(raw, type=SnapshotNotes)
