"""A learner's settings: the run's objective, optimiser and schedule, and its own layout."""

import math
from dataclasses import dataclass, field

from peers.learning.trial import check_formulas
from swarm.errors import UserError
from swarm.jobs.training import Sharding
from swarm.wire.manifest import Adapter, Objective, Optimiser, Schedule, Thresholds


@dataclass(frozen=True)
class LearnerSettings:
    """A manifest's settings for learning, and the trainer's own choices and their seed."""

    objective: Objective
    schedule: Schedule
    seed: int = 0
    optimiser: Optimiser = field(default_factory=Optimiser)
    completion_tokens_max: int = 0
    """The run's length limit."""
    adapter: Adapter = field(default_factory=Adapter)
    teacher: str = ""
    """Folder of the teacher; empty: there is none, or it is the base."""
    log_difference_max: float = Thresholds().log_difference_max
    """As in the run's thresholds; only `objective.behaviour = "engine"` needs it."""
    sharding: Sharding = field(default_factory=Sharding)
    attention: str | None = None
    """One of `attention.ATTENTIONS`; None: the fastest on the device."""
    flat: bool = False
    """Pack one long row per pass on a CPU too, as on CUDA; it is slower there."""

    def __post_init__(self) -> None:
        """Raise `UserError` when objective and schedule contradict each other, or a formula is not
        installed here as the owner signed it."""
        problem = self.objective.problem(self.schedule)
        if problem is not None:
            raise UserError(problem)
        check_formulas(self.objective)

    def learning_rate(self, optimiser_step: int) -> float:
        """Learning rate of one optimiser step, counted from 0 over the whole run."""
        total = self.schedule.steps * self.optimiser.optimiser_steps
        return learning_rate(self.optimiser, total, optimiser_step)


def learning_rate(optimiser: Optimiser, optimiser_steps: int, step: int) -> float:
    """The rate of optimiser step `step` (from 0) of `optimiser_steps` in the whole run.

    It depends on the step alone, rises linearly over `warmup_steps`, and every decay ends at
    `final_learning_rate_share` of the rate. Cosine: Loshchilov & Hutter 2017 (1608.03983), without
    restarts. WSD (warm-up, stable, decay): Hu et al. 2024 (2404.06395), with the linear decay of
    Hägele et al. 2024 (2405.18392)."""
    if step < optimiser.warmup_steps:
        return optimiser.learning_rate * (step + 1) / optimiser.warmup_steps
    begin = optimiser.warmup_steps
    if optimiser.learning_rate_schedule == "wsd":
        begin = max(begin, optimiser_steps - math.ceil(optimiser.decay_share * optimiser_steps))
    done = min(1.0, max(0, step - begin) / max(1, optimiser_steps - begin))  # of the decay
    lost = {
        "constant": 0.0,
        "cosine": (1 - math.cos(math.pi * done)) / 2,
        "linear": done,
        "wsd": done,
    }[optimiser.learning_rate_schedule]
    return optimiser.learning_rate * (1 - (1 - optimiser.final_learning_rate_share) * lost)
