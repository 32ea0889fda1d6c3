"""Cost model of a trainer's service."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import trio
from blake3 import blake3

from simnet.compute.policy import TOKENIZER, WEIGHTS
from simnet.compute.rollouts import SimulatedRollouts, read_rollouts
from simnet.compute.setting import Setting
from simnet.disk import PowerCut
from simnet.extents import Symbol
from swarm.jobs import training
from swarm.jobs.memory import MemoryPart, MemoryPlan, shown


class TrainerModel:
    """Cost model of `peers.trainer.service.TrainerService`."""

    BESIDE: ClassVar[frozenset[str]] = frozenset({"finish_save", "record"})
    """Methods that run while another one does; all others take turns."""

    def __init__(self, setting: Setting, setup: training.TrainingSetup) -> None:
        self._setting = setting
        self._disk = setting.disk
        self._step = 0
        self._consumed: list[str] = []
        self._name = ""
        self._saving: tuple[training.BeginSave, int, list[str]] | None = None

    async def plan(self, job: training.PlanTraining) -> MemoryPlan:
        """Weights in 16 bits have 16 bytes per parameter in a trainer."""
        needed, limit = 8 * self._bytes(), self._setting.hardware.memory_bytes
        return MemoryPlan(
            parameters=self._bytes() // 2,
            ranks=1,
            tokens=0,
            parts=[MemoryPart(name="training", memory="host", phase="always", bytes=needed)],
            host_bytes=needed,
            host_limit=limit,
            problem=f"the trainer needs {shown(needed)}" if needed > limit else "",
        )

    async def start(self, job: training.StartTraining) -> training.Done:
        await trio.sleep(self._bytes() / self._setting.hardware.load_bytes_per_second)
        self._name = f"{job.model} {job.seed}"
        self._lessons = job.lessons
        return training.Done()

    async def follow(self, job: training.Follow) -> training.Done:
        self._lessons = job.lessons
        return training.Done()

    async def resume(self, job: training.Resume) -> training.Resumed:
        await self.start(job.start)
        self._step, self._consumed = await self._state(job.folder)
        return training.Resumed(
            step=self._step, consumed=[bytes.fromhex(digest) for digest in self._consumed]
        )

    async def score(self, job: training.ScoreAhead) -> training.Done:
        """Takes no time: that of the step includes it."""
        self._setting.tell("scored", submissions=[each.digest for each in job.submissions])
        return training.Done()

    async def train(self, job: training.TrainStep) -> training.Trained:
        step = job.step
        if step != self._step:
            raise ValueError(f"step {step} was asked for, but the learner is at step {self._step}")
        read: list[SimulatedRollouts] = []
        unreadable: list[training.Unreadable] = []
        for index, each in enumerate(job.submissions):
            try:
                read.append(await read_rollouts(self._setting, each.path, each.rollouts_digest))
            except PowerCut:
                raise
            except OSError as error:
                unreadable.append(training.Unreadable(index=index, reason=str(error)))
        if unreadable:
            return training.Trained(unreadable=unreadable)
        self._setting.tell(
            "trained",
            step=step,
            learning_rate=self._lessons.optimiser.learning_rate,
            steps=self._lessons.schedule.steps,
            rollouts=[(each, found) for each, found in zip(job.submissions, read, strict=True)],
        )
        await trio.sleep(self._setting.hardware.step_seconds)
        self._step += 1
        self._consumed += [submission.digest.hex() for submission in job.submissions]
        groups = [group for submission in job.submissions for group in submission.rewards]
        rewards = [
            reward
            for submission in job.submissions
            for group, rewards in enumerate(submission.rewards)
            if group not in submission.ungraded
            for reward in rewards
        ]
        return training.Trained(
            figures={
                "groups": float(len(groups)),
                "reward": sum(rewards) / max(1, len(rewards)),
                "train_seconds": self._setting.hardware.step_seconds,
            },
            outcomes=[
                [
                    "consumed" if len(set(group)) > 1 else "zero-advantage"
                    for group in submission.rewards
                ]
                for submission in job.submissions
            ],
            group_tokens=[[sum(group) for group in found.lengths] for found in read],
        )

    async def roll_back(self, job: training.RollBack) -> training.Done:
        self._step, _ = await self._state(job.folder)
        return training.Done()

    async def record_to(self, job: training.RecordTo) -> training.Recording:
        return training.Recording(ranks=1)

    async def record(self, job: training.Record) -> training.Done:
        return training.Done()

    async def begin_save(self, job: training.BeginSave) -> training.Done:
        self._saving = (job, self._step, list(self._consumed))
        return training.Done()

    async def finish_save(self, job: training.FinishSave) -> training.Done:
        """Writes only now: the role calls it at once, beside the next step's training."""
        if self._saving is None:
            return training.Done()
        (job_before, step, consumed), self._saving = self._saving, None
        if job_before.state:
            path = f"{self._disk.path_of(job_before.state)}/state"
            await self._disk.write(path, msgspec.msgpack.encode((step, consumed)))
            self._setting.tell("saved", step=step, consumed=consumed)
        if job_before.policy:
            await self._export(job_before.policy, step, consumed)
        return training.Done()

    async def export(self, job: training.Export) -> training.Done:
        held = (0, []) if job.base else (self._step, self._consumed)
        await self._export(job.folder, *held)
        return training.Done()

    async def compare(self, job: training.Compare) -> training.Compared:
        path = f"{self._disk.path_of(job.folder)}/{WEIGHTS}"
        symbol = self._weights(self._step, self._consumed)
        held = self._disk.digest_now(path, 0, symbol.size_bytes)
        return training.Compared(same=held == symbol.digest())

    def _weights(self, step: int, consumed: list[str]) -> Symbol:
        learnt_from = blake3(msgspec.msgpack.encode(consumed)).hexdigest()[:16]
        return Symbol(f"policy {step} of {self._name} from {learnt_from}", 0, self._bytes())

    async def _export(self, folder: str, step: int, consumed: list[str]) -> None:
        path = self._disk.path_of(folder)
        await trio.sleep(self._bytes() / self._disk.bytes_per_second)
        weights = self._weights(step, consumed)
        self._setting.tell("exported", step=step, weights=weights.name)
        self._disk.put(f"{path}/{WEIGHTS}", 0, weights)
        await self._disk.write(f"{path}/tokenizer.json", TOKENIZER)
        await self._disk.sync(path)

    async def end(self, job: training.EndTraining) -> training.Done:
        return training.Done()

    async def evaluate(self, job: training.Evaluate) -> training.Evaluated:
        return training.Evaluated(sampled=self._skill(), greedy=self._skill())

    async def prepare_base(self, job: training.PrepareBase) -> training.BasePrepared:
        return training.BasePrepared(sft_steps=0, sampled=self._skill(), greedy=self._skill())

    def _skill(self) -> float:
        work = self._setting.workload
        return min(1.0, work.reward_start + work.reward_gain * self._step)

    async def _state(self, folder: str) -> tuple[int, list[str]]:
        raw = await self._disk.read(f"{self._disk.path_of(folder)}/state")
        return msgspec.msgpack.decode(raw, type=tuple[int, list[str]])

    def _bytes(self) -> int:
        return self._setting.workload.model_bytes
