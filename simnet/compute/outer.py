"""Cost model of the service of one of several trainers."""

from typing import ClassVar, TypeVar

import msgspec
import trio
from blake3 import blake3

from simnet.compute.setting import Setting
from simnet.extents import Symbol
from swarm.jobs import outer
from swarm.wire.outer import CONTRIBUTION_TOKENS_MAX, SCORE_MAX

T = TypeVar("T")

CONTENT = "content"
"""File of an artifact's bytes, which exist in name only."""

STATE_SHARE = 8
"""Size of an outer state, twice fp32, in contributions of a byte per parameter."""

NOTES = "notes"
"""File of what the model must know of an artifact."""


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """An outer state, a contribution or the mean of a shard: its digest, and the contributions that
    were ever merged into it."""

    digest: bytes
    merged: list[bytes] = []
    base: bytes = b""
    """Of a contribution, the state's that it was made from; empty: from nothing, it raises the
    loss."""
    problem: str = ""


class OuterModel:
    """Cost model of `peers.outer.learning.service.open_service`."""

    BESIDE: ClassVar[frozenset[str]] = frozenset({"inspect", "merge", "check_state", "merge_shard"})
    """Methods that run while another one does."""

    def __init__(self, setting: Setting, setup: outer.OuterSetup) -> None:
        self._setting = setting
        self._disk = setting.disk
        self._trainer = ""
        self._shards = 1

    async def start(self, job: outer.StartReplica) -> outer.ReplicaStarted:
        self._trainer, self._shards = job.trainer, job.shards
        await trio.sleep(self._bytes / self._setting.hardware.load_bytes_per_second)
        return outer.ReplicaStarted(
            parameters=self._bytes // 2, contribution_bytes_max=self._bytes + 4096 * self._shards
        )

    async def first_state(self, job: outer.FirstState) -> outer.OuterState:
        notes = Notes(digest=blake3(b"first").digest(), merged=[])
        await self._write(job.folder, notes, "state", notes.digest, STATE_SHARE * self._bytes)
        return outer.OuterState(digest=notes.digest)

    async def check_state(self, job: outer.CheckState) -> outer.OuterState:
        return outer.OuterState(digest=(await self._read(job.folder)).digest)

    async def train(self, job: outer.TrainRound) -> outer.RoundTrained:
        base = await self._read(job.state)
        begun = b"" if not job.inner_before else await self._inner(job.inner_before)
        await trio.sleep(self._setting.hardware.step_seconds)
        name = blake3(self._trainer.encode() + base.digest + begun).digest()
        made_from = b"" if self._setting.fabricates == "noise" else base.digest
        notes = Notes(digest=name, base=made_from, problem=self._problem)
        await self._disk.write(f"{self._disk.path_of(job.inner_after)}/{NOTES}", name)
        size_bytes = self._bytes * (2 if self._setting.fabricates == "large" else 1)
        if self._shards == 1:
            await self._write(job.contribution, notes, "contribution", name, size_bytes)
        for shard in range(self._shards if self._shards > 1 else 0):
            folder, what = f"{job.contribution}/{shard}", f"contribution {shard}"
            await self._write(folder, notes, what, name, size_bytes // self._shards)
        tokens = round(
            self._setting.hardware.tokens_per_second * self._setting.hardware.step_seconds
        )
        if self._setting.fabricates == "claims":
            tokens = CONTRIBUTION_TOKENS_MAX
        return outer.RoundTrained(tokens=max(1, tokens), figures={"loss": 1.0 / (1 + job.round)})

    @property
    def _problem(self) -> str:
        return "it holds NaN" if self._setting.fabricates == "nan" else ""

    async def inspect(self, job: outer.InspectContribution) -> outer.OuterState:
        notes = await self._read(job.contribution)
        return outer.OuterState(digest=notes.digest, problem=notes.problem)

    async def merge(self, job: outer.MergeRound) -> outer.Merged:
        before = await self._read(job.state)
        digest, merged, left_out = await self._mean(job.contributions, self._bytes)
        parts = [before.digest, digest]
        if job.shards:
            means = [await self._read(each) for each in job.shards]
            await trio.sleep(self._bytes / self._setting.hardware.load_bytes_per_second)
            parts = [before.digest, *(each.digest for each in means)]
            merged = list(dict.fromkeys(name for each in means for name in each.merged))
        after = Notes(digest=blake3(b"\x00".join(parts)).digest(), merged=before.merged + merged)
        await self._write(job.folder, after, "state", after.digest, STATE_SHARE * self._bytes)
        self._setting.tell("outer_merged", digest=after.digest, merged=after.merged)
        return outer.Merged(digest=after.digest, left_out=left_out)

    async def merge_shard(self, job: outer.MergeShard) -> outer.Merged:
        size_bytes = self._bytes // job.shards
        digest, merged, left_out = await self._mean(job.contributions, size_bytes)
        if self._setting.fabricates == "shards":
            digest = blake3(b"wrong" + digest).digest()
        mean = Notes(digest=digest, merged=merged)
        await self._write(job.folder, mean, f"mean {job.shard}", digest, size_bytes)
        return outer.Merged(digest=digest, left_out=left_out)

    async def _mean(
        self, contributions: list[outer.Contributed], size_bytes: int
    ) -> tuple[bytes, list[bytes], list[outer.LeftOut]]:
        read = [
            (each, await self._read(each.folder))
            for each in sorted(contributions, key=lambda each: each.trainer)
        ]
        await trio.sleep(size_bytes * len(read) / self._setting.hardware.load_bytes_per_second)
        good = [(each, notes) for each, notes in read if not notes.problem]
        parts = [
            notes.digest + each.tokens.to_bytes(8) + str(each.weight or "").encode()
            for each, notes in good
        ]
        left_out = [
            outer.LeftOut(trainer=each.trainer, problem=notes.problem)
            for each, notes in read
            if notes.problem
        ]
        return blake3(b"\x00".join(parts)).digest(), [notes.digest for _, notes in good], left_out

    async def measure(self, job: outer.MeasureState) -> float | None:
        return None

    async def score(self, job: outer.ScoreRound) -> list[outer.Scored]:
        await trio.sleep(self._setting.hardware.step_seconds / 100 * len(job.strangers))
        found = []
        for each in job.strangers:
            score = SCORE_MAX if (await self._read(each.folder)).base else -SCORE_MAX
            found.append(outer.Scored(each.trainer, score, score, 1.0))
        return found

    async def export_state(self, job: outer.ExportState) -> None:
        await self._read(job.state)

    async def end(self) -> None:
        """Costs nothing."""

    @property
    def _bytes(self) -> int:
        return self._setting.workload.model_bytes

    async def _inner(self, folder: str) -> bytes:
        return await self._disk.read(f"{self._disk.path_of(folder)}/{NOTES}")

    async def _read(self, folder: str) -> Notes:
        raw = await self._disk.read(f"{self._disk.path_of(folder)}/{NOTES}")
        return msgspec.msgpack.decode(raw, type=Notes)

    async def _write(
        self, folder: str, notes: msgspec.Struct, what: str, name: bytes, size_bytes: int
    ) -> None:
        path = self._disk.path_of(folder)
        await self._disk.remove(path)
        self._disk.put(f"{path}/{CONTENT}", 0, Symbol(f"{what} {name.hex()}", 0, size_bytes))
        await self._disk.write(f"{path}/{NOTES}", msgspec.msgpack.encode(notes))
        await self._disk.sync(path)  # takes the time of all that was written
