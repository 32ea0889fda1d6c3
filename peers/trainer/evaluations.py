"""Evaluations beside the training: a child of its own plays held-out tasks with new policies.

Imports no torch. Nothing waits for an evaluation: a policy that comes while one runs is left to the
next, and a child that dies or fails is a sentence in the log.
"""

from __future__ import annotations

from dataclasses import dataclass

from peers.environments.collection import labels
from peers.evaluation.statistics import Estimate, estimate
from peers.trainer.progress import Progress
from peers.trainer.publishing import Publisher
from peers.trainer.settings import TrainerSettings
from swarm.errors import leaf_errors
from swarm.jobs import Hardware
from swarm.jobs.evaluation import (
    DrawTasks,
    EvaluationService,
    EvaluationSetup,
    PlayTasks,
    Sample,
    TasksDrawn,
)
from swarm.manifest import EnvironmentReference, RunManifest, Sampling
from swarm.node.run_node import RunNode
from swarm.world import Child, client

SERVICE = "peers.evaluation.service:EvaluationService"
START_DEADLINE_SECONDS = 120.0
"""Time for the child to import torch at the lowest priority."""

NICENESS = 19
"""Priority of the child: it takes only the processor time that nobody else wants."""


@dataclass(frozen=True)
class PolicyEvaluated:
    """Figures of one policy on held-out tasks."""

    policy: int
    reward: float
    """Mean over the environments, by their weights."""
    environments: dict[str, Estimate]
    """Mean reward by the environment's label."""
    tokens: dict[str, float]
    """Mean length of a sample by the environment's label."""


class Evaluations:
    """Evaluates the newest policy each time `evaluate_steps` further steps are done."""

    def __init__(
        self, peer: RunNode, progress: Progress, publisher: Publisher, settings: TrainerSettings
    ) -> None:
        self._peer, self._progress, self._publisher = peer, progress, publisher
        self._settings = settings
        self._begun: tuple[int, int] = (-1, -1)
        """(lineage, number of whole intervals done) at the last evaluation."""
        self._new: PolicyEvaluated | None = None

    def take(self) -> PolicyEvaluated | None:
        """The newest evaluation, once."""
        found, self._new = self._new, None
        return found

    async def run(self) -> None:
        """Evaluate policies until cancelled."""
        while True:
            if self._is_due():
                await self._attempt()
            else:
                await self._progress.changed.wait_change()

    def _is_due(self) -> bool:
        policy = self._progress.policy
        now = (self._progress.lineage, policy // self._settings.evaluate_steps)
        if policy not in self._publisher.published or now <= self._begun:
            return False
        self._begun = now
        return True

    async def _attempt(self) -> None:
        policy = self._progress.policy
        folder = str(self._peer.node.disk.local_path(self._publisher.newest_folder()))
        events = self._peer.node.events
        try:
            found = await self._evaluate(policy, folder)
        except Exception as error:  # of an environment, an engine, a machine: training goes on
            reason = "; ".join(str(leaf) or type(leaf).__name__ for leaf in leaf_errors(error))
            events.emit("trainer.evaluation_failed", policy=policy, reason=reason)
            return
        self._new = found
        self._publisher.evaluated, self._publisher.evaluation = policy, found.reward
        events.emit(
            "trainer.policy_evaluated",
            policy=policy,
            reward=found.reward,
            environments={
                label: {
                    "reward": each.value,
                    "low": each.low,
                    "high": each.high,
                    "completion_length": found.tokens[label],
                }
                for label, each in found.environments.items()
            },
        )

    async def _evaluate(self, policy: int, folder: str) -> PolicyEvaluated:
        manifest = self._progress.versions.manifest_of(policy)
        weighted = [
            (label, each)
            for label, each in zip(
                labels(manifest.environments), manifest.environments, strict=True
            )
            if each.weight
        ]
        setup = EvaluationSetup(
            folder=folder,
            environments=[reference for _, reference in weighted],
            hardware=Hardware(device=self._settings.evaluate_device, dtype=self._settings.dtype),
            niceness=NICENESS,
        )
        async with self._peer.node.compute.child(
            SERVICE,
            setup,
            name="evaluation",
            interpreter=self._settings.interpreter or None,
            start_deadline_seconds=START_DEADLINE_SECONDS,
        ) as child:
            drawn = await client(EvaluationService, child).draw(
                DrawTasks(
                    split="held_out",
                    seed=0,
                    step=policy,
                    tasks=self._settings.evaluate_tasks,
                    max_new_tokens=manifest.sampling.max_new_tokens,
                    stop_ids=manifest.sampling.stop_ids,
                )
            )
            samples = [
                await self._play(child, index, drawn, manifest) for index in range(len(weighted))
            ]
        return _evaluated(policy, weighted, samples)

    async def _play(
        self, child: Child, index: int, drawn: TasksDrawn, manifest: RunManifest
    ) -> list[Sample]:
        sampling = Sampling(
            temperature=manifest.sampling.temperature,
            max_new_tokens=drawn.max_new_tokens,
            stop_ids=drawn.stop_ids,
            group_size=1,
        )
        job = PlayTasks(environment=index, rows=list(range(drawn.tasks[index])), sampling=sampling)
        async with child.stream("play", job, Sample) as samples:
            return [sample async for sample in samples]


def _evaluated(
    policy: int,
    weighted: list[tuple[str, EnvironmentReference]],
    samples: list[list[Sample]],
) -> PolicyEvaluated:
    figures = {
        label: estimate([each.reward for each in of])
        for (label, _), of in zip(weighted, samples, strict=True)
    }
    total = sum(reference.weight for _, reference in weighted)
    return PolicyEvaluated(
        policy=policy,
        reward=sum(each.weight / total * figures[label].value for label, each in weighted),
        environments=figures,
        tokens={
            label: sum(each.tokens for each in of) / len(of)
            for (label, _), of in zip(weighted, samples, strict=True)
        },
    )
