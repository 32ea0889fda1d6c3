"""Cost model of an evaluation's service."""

import trio

from simnet.compute.setting import Setting
from swarm.errors import UserError
from swarm.jobs import evaluation


class EvaluationModel:
    """Cost model of `peers.evaluation.service.EvaluationService`."""

    def __init__(self, setting: Setting, setup: evaluation.EvaluationSetup) -> None:
        self._setting = setting
        self._folder = setting.disk.path_of(setup.folder)
        self._environments = len(setup.environments)
        self._policy = int(self._folder.rpartition("-")[2])  # LINEAGE-STEP

    async def draw(self, job: evaluation.DrawTasks) -> evaluation.TasksDrawn:
        workload = self._setting.workload
        await trio.sleep(workload.model_bytes / self._setting.hardware.load_bytes_per_second)
        self._check_folder()
        return evaluation.TasksDrawn(
            checkpoint="00" * 32,
            engine="simulated",
            tasks=[job.tasks] * self._environments,
            max_new_tokens=job.max_new_tokens,
            stop_ids=job.stop_ids,
        )

    async def play(self, job: evaluation.PlayTasks) -> None:
        self._job, self._rows = job, iter(job.rows)

    async def finished(self, job: evaluation.NextSamples) -> list[evaluation.Sample]:
        row = next(self._rows, None)
        if row is None:
            return []
        workload = self._setting.workload
        tokens = max(1, round(workload.completion_tokens_mean))
        share = workload.reward_start + workload.reward_gain * self._policy
        await trio.sleep(tokens / self._setting.hardware.tokens_per_second)
        self._check_folder()
        return [
            evaluation.Sample(
                environment=self._job.environment,
                row=row,
                reward=float(row < share * len(self._job.rows)),
                finished=True,
                tokens=tokens,
                turns=[],
            )
        ]

    def _check_folder(self) -> None:
        """The policy's files are read until the end: an adapter's base, for one, when it is due."""
        if not self._setting.disk.exists(self._folder):
            raise UserError(f"{self._folder} is gone")
