"""The figures of a trained step: for the log, for the events, and for the child's records."""

from __future__ import annotations

import math
from dataclasses import dataclass

from peers.evaluation.during import Evaluations
from peers.trainer.accepted import TrainerLog
from peers.trainer.child import TrainerChild
from peers.trainer.environments import Curricula, environment_figures
from peers.trainer.orders import Forecast
from peers.trainer.progress import Progress
from peers.trainer.steps import Batches, StepTimes, TrainedStep
from swarm.events import Events
from swarm.jobs.training import Figures
from swarm.ledger.entries import TrainingFigures


@dataclass(eq=False)
class StepReports:
    """Gathers the figures of each step, and reports them."""

    events: Events
    progress: Progress
    forecast: Forecast
    log: TrainerLog
    batches: Batches
    curricula: Curricula
    evaluations: Evaluations

    def figures(self, step: int, trained: TrainedStep, times: StepTimes) -> Figures:
        """The learner's metrics, those of the step's time, and of the groups left out."""
        idle = self.batches.idle
        batch, values = trained.batch, trained.record.values
        left_out = sorted(self.log.left_out.items())
        return {
            **trained.figures,
            "submissions": len(batch),
            "seconds": times.handed_over - times.training,
            "ahead_seconds": self.batches.ahead,
            "idle_seconds": sum(idle.values()),
            **{f"idle_{cause}_seconds": waited for cause, waited in idle.items()},
            "idle_weights_seconds": times.handed_over - times.trained,
            "step_seconds": times.handed_over - times.began,
            "keep_rate": self.forecast.keep_rate.value,
            **{f"left_out_{reason}": groups for reason, groups in left_out},
            "staleness": step - min(accepted.verdict.policy for accepted in batch),
            **({"states_valued": sum(map(len, values))} if values else {}),
        }

    async def report(
        self, child: TrainerChild, step: int, trained: TrainedStep, figures: Figures
    ) -> None:
        """Report a published step, and have the child record it."""
        manifest_of_step = self.progress.versions.manifest_of(step)
        environments = environment_figures(
            trained.batch, trained.group_tokens, manifest_of_step.environments
        )
        for label, level in self.curricula.levels_of(manifest_of_step).items():
            environments.setdefault(label, {})["level"] = level
        evaluated = self.evaluations.take()
        if evaluated is not None:
            policy = evaluated.reference.step
            figures |= {"evaluation": evaluated.reward, "evaluation_policy": policy}
            for found in evaluated.environments:
                environments.setdefault(found.label, {})["evaluation"] = found.reward
        self.events.emit(
            "trainer.trained_on",
            step=step,
            submissions=[accepted.digest for accepted in trained.batch],
        )
        self.events.emit(
            "trainer.step_trained", **{**figures, "environments": environments, "step": step}
        )
        await child.record(step, figures, environments)


def logged_figures(figures: Figures) -> TrainingFigures:
    """The figures of a step that its trainer logs, by the learner's names; only finite ones."""
    clipped = [value for name, value in figures.items() if name.startswith("clipped_")]
    found = {
        **{name: figures.get(name) for name in ("reward", "entropy", "gradient_norm", "loss")},
        "length": figures.get("completion_length"),
        "kl": figures.get("kl_generation"),
        "kl_reference": figures.get("kl_reference"),
        "clipped": sum(clipped) if clipped else None,
        "learning_rate": figures.get("learning_rate"),
        "seconds": figures.get("step_seconds"),
    }
    return TrainingFigures(
        **{
            name: float(value)
            for name, value in found.items()
            if value is not None and math.isfinite(value)
        }
    )
