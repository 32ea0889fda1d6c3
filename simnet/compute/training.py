"""Cost model of a trainer's service."""

from typing import ClassVar, NamedTuple

import msgspec
import trio
from blake3 import blake3

from simnet.compute.rollouts import SimulatedRollouts, read_rollouts
from simnet.compute.setting import TOKENIZER, WEIGHTS, Setting
from simnet.disk import PowerCut
from simnet.extents import Symbol
from swarm.jobs import training
from swarm.jobs.memory import MemoryPart, MemoryPlan
from swarm.terminal.figures import readable_bytes


class _State(NamedTuple):
    step: int
    learnt_from: str
    """Digest of all submissions ever trained on, in order."""
    consumed: dict[int, list[str]]
    """Submissions that each step trained on, while rollouts of its policy may be trained on."""


class TrainerModel:
    """Cost model of `peers.trainer.service.TrainerService`."""

    BESIDE: ClassVar[frozenset[str]] = frozenset({"finish_save", "record"})
    """Methods that run while another one does; all others take turns."""

    def __init__(self, setting: Setting, setup: training.TrainingSetup) -> None:
        self._setting = setting
        self._disk = setting.disk
        self._step = 0
        self._learnt_from = ""
        self._consumed: dict[int, list[str]] = {}
        self._name = ""
        self._saving: tuple[training.BeginSave, _State] | None = None

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
            problem=f"the trainer needs {readable_bytes(needed)}" if needed > limit else "",
        )

    async def start(self, job: training.StartTraining) -> None:
        await trio.sleep(self._bytes() / self._setting.hardware.load_bytes_per_second)
        self._name = f"{job.model} {job.seed}"
        self._training_terms = job.terms
        self._step = job.step

    async def follow(self, job: training.Follow) -> None:
        self._training_terms = job.terms

    async def resume(self, job: training.Resume) -> training.Resumed:
        await self.start(job.start)
        self._step, self._learnt_from, self._consumed = await self._state(job.folder)
        return training.Resumed(
            step=self._step,
            consumed=[bytes.fromhex(name) for names in self._consumed.values() for name in names],
        )

    async def score(self, job: training.ScoreAhead) -> None:
        """Takes no time: that of the step includes it."""
        self._setting.tell("scored", submissions=[each.digest for each in job.submissions])

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
            learning_rate=self._training_terms.optimiser.learning_rate,
            steps=self._training_terms.schedule.steps,
            rollouts=[(each, found) for each, found in zip(job.submissions, read, strict=True)],
        )
        await trio.sleep(self._setting.hardware.step_seconds)
        self._step += 1
        names = [submission.digest.hex() for submission in job.submissions]
        self._learnt_from = _digest([self._learnt_from, *names])
        self._consumed[step] = [*self._consumed.get(step, []), *names]
        oldest = self._step - self._training_terms.schedule.max_staleness
        self._consumed = {at: names for at, names in self._consumed.items() if at >= oldest}
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
        )

    async def roll_back(self, job: training.RollBack) -> None:
        self._step = (await self._state(job.folder)).step

    async def record_to(self, job: training.RecordTo) -> int:
        return 1

    async def record(self, job: training.Record) -> None:
        """Costs nothing."""

    async def begin_save(self, job: training.BeginSave) -> None:
        self._saving = (job, self._held())

    async def finish_save(self, job: training.FinishSave) -> None:
        """Writes only now: the role calls it at once, beside the next step's training."""
        if self._saving is None:
            return
        (job_before, state), self._saving = self._saving, None
        if job_before.state:
            path = f"{self._disk.path_of(job_before.state)}/state"
            await self._disk.write(path, msgspec.msgpack.encode(state))
            consumed = [name for names in state.consumed.values() for name in names]
            self._setting.tell("saved", step=state.step, consumed=consumed)
        if job_before.policy:
            await self._export(job_before.policy, state)

    def _held(self) -> _State:
        return _State(self._step, self._learnt_from, dict(self._consumed))

    async def export(self, job: training.Export) -> None:
        await self._export(job.folder, _State(0, "", {}) if job.base else self._held())

    async def compare(self, job: training.Compare) -> bool:
        path = f"{self._disk.path_of(job.folder)}/{WEIGHTS}"
        symbol = self._weights(self._held())
        return bool(self._disk.digest_now(path, 0, symbol.size_bytes) == symbol.digest())

    def _weights(self, state: _State) -> Symbol:
        name = f"policy {state.step} of {self._name} from {state.learnt_from[:16]}"
        return Symbol(name, 0, self._bytes())

    async def _export(self, folder: str, state: _State) -> None:
        path = self._disk.path_of(folder)
        await trio.sleep(self._bytes() / self._disk.bytes_per_second)
        weights = self._weights(state)
        self._setting.tell("exported", step=state.step, weights=weights.name)
        self._disk.put(f"{path}/{WEIGHTS}", 0, weights)
        await self._disk.write(f"{path}/tokenizer.json", TOKENIZER)
        await self._disk.sync(path)

    async def end(self) -> None:
        """Costs nothing."""

    async def _state(self, folder: str) -> _State:
        raw = await self._disk.read(f"{self._disk.path_of(folder)}/state")
        return msgspec.msgpack.decode(raw, type=_State)

    def _bytes(self) -> int:
        return self._setting.workload.model_bytes


def _digest(parts: list[str]) -> str:
    return blake3(msgspec.msgpack.encode(parts)).hexdigest()
