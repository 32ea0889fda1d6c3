"""A learner's settings: the run's objective, optimiser and schedule, and its own layout."""

from __future__ import annotations

from dataclasses import dataclass, field

from peers.trainer.learning import schedule as schedules
from peers.trainer.learning.objective import check
from swarm.jobs import Sharding
from swarm.messages import Objective, Optimiser, Schedule


@dataclass(frozen=True)
class LearnerSettings:
    """A manifest's settings for learning, and the trainer's own choices and their seed."""

    objective: Objective
    schedule: Schedule
    seed: int = 0
    optimiser: Optimiser = field(default_factory=Optimiser)
    completion_tokens_max: int = 0
    """The run's length limit; only the objective `dr_grpo` needs it."""
    sharding: Sharding = field(default_factory=Sharding)
    attention: str | None = None
    """One of `packing.ATTENTIONS`; None: the fastest on the device."""
    flat: bool = False
    """Pack one long row per pass on a CPU too, as on CUDA; it is slower there."""

    def check(self) -> None:
        """Raise `UserError` when objective and schedule contradict each other."""
        check(self.objective, self.schedule)

    def learning_rate(self, optimiser_step: int) -> float:
        """Learning rate of one optimiser step, counted from 0 over the whole run."""
        total = self.schedule.steps * self.optimiser.optimiser_steps
        return schedules.learning_rate(self.optimiser, total, optimiser_step)
