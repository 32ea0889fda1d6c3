"""Studies of the trainer in one process: the demo's recipe with one part changed at a time.

    python -m benchmarks.studies asynchrony --seeds 5 --steps 250
    python -m benchmarks.studies clipping --seeds 5 --steps 250
    python -m benchmarks.studies mismatch --seeds 5 --steps 150

Prints one JSON object: for each variant the reward's curve over the seeds, the final reward, the
effective sample size as a share of the tokens, the gradient norm before clipping, and the share of
seeds that collapse (a final reward below half of the best mean over ten steps).

- `asynchrony`: how stale may rollouts be? Policies 0, 1, 2, 4 and 8 steps behind, for both
  denominators of the ratio (`old`). Published: up to 4 is as good as none (INTELLECT-2, §5).
- `clipping`: δ = 4 (two-sided) against none (one-sided), on rollouts six steps old and at twice the
  demo's learning rate, so that ratios leave the clipping range.
- `mismatch`: an engine that computes otherwise than the trainer (in bf16, hidden states rounded as
  fp8, noise on a tenth of the positions' logits), with and without the corrections that use what
  the engine reports (`objective.behaviour = "engine"`, arXiv 2605.14220).
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from benchmarks.common import at_least, load_average, spread
from benchmarks.recipe import Sampler, train
from peers.demo.recipes import ENVIRONMENT, OBJECTIVE, OPTIMISER, SAMPLING, SCHEDULE
from peers.demo.warmup import prepare_base
from peers.engines.native import NativeEngine
from peers.environments import load as load_environment
from peers.learning.learner import Learner
from peers.learning.settings import LearnerSettings
from swarm.terminal.output import print_json
from swarm.wire.manifest import Objective, Optimiser, Schedule

TAIL = 10
"""Number of last steps whose mean is the final reward."""

ONE_SIDED = 1e9
"""A δ that no ratio reaches: log-ratios are clamped at 20."""


BLURRED_SHARE = 0.1
"""Share of the positions whose logits have noise."""


class Blurred(NativeEngine):
    """An engine whose logits are off by normal noise of `nats`, or whose states are rounded."""

    def __init__(self, folder: Path, nats: float = 0.0) -> None:
        super().__init__(folder)
        self._nats, self._generator = nats, torch.Generator().manual_seed(0)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        if not self._nats:
            return super().logits(states.to(torch.float8_e4m3fn).to(states.dtype))
        exact = super().logits(states)
        noisy = torch.rand(len(exact), 1, generator=self._generator) < BLURRED_SHARE
        noise = torch.randn(exact.shape, generator=self._generator)
        return exact + noisy * self._nats * noise


@dataclass(frozen=True)
class Variant:
    """One variant of the recipe."""

    objective: Objective = OBJECTIVE
    optimiser: Optimiser = OPTIMISER
    old: str = "generation"
    staleness: int = SCHEDULE.asynchrony
    """Age of the generating policy, in steps."""
    engine: Callable[[Path], NativeEngine] = NativeEngine
    log_difference_max: float = 20.0
    """What a run's thresholds would allow: here, all that the engines do."""

    def settings(self, seed: int, steps: int) -> LearnerSettings:
        schedule = Schedule(
            steps=steps,
            groups_per_step=SCHEDULE.groups_per_step,
            asynchrony=self.staleness,
            max_staleness=max(4, self.staleness),
            old="step_start" if self.old == "step_start" else "generation",
        )
        return LearnerSettings(
            self.objective,
            schedule,
            seed,
            optimiser=self.optimiser,
            completion_tokens_max=SAMPLING.max_new_tokens,
            log_difference_max=self.log_difference_max,
        )


ENGINES: dict[str, Callable[[Path], NativeEngine]] = {
    "fp32": NativeEngine,
    "bf16": functools.partial(NativeEngine, dtype=torch.bfloat16),
    "fp8 states": Blurred,
    **{f"{nats:g} nats": functools.partial(Blurred, nats=nats) for nats in (0.1, 0.5, 2.5)},
}
CORRECTIONS = {
    "grpo": ("grpo", "trainer", "generation"),
    "grpo, engine": ("grpo", "engine", "generation"),
    "tis, trainer": ("tis", "trainer", "step_start"),
    "tis, engine": ("tis", "engine", "step_start"),
    "icepop, engine": ("icepop", "engine", "step_start"),
    "dppo, engine": ("dppo", "engine", "generation"),
}
"""Objective, whose μ it sees, and the ratio's denominator."""

_FAST = structs.replace(OPTIMISER, learning_rate=2 * OPTIMISER.learning_rate)
STUDIES = {
    "asynchrony": {
        f"{old}, {age} steps old": Variant(old=old, staleness=age)
        for old in ("generation", "step_start")
        for age in (0, 1, 2, 4, 8)
    },
    "clipping": {
        side: Variant(structs.replace(OBJECTIVE, delta=delta), _FAST, staleness=6)
        for side, delta in (("two-sided", OBJECTIVE.delta), ("one-sided", ONE_SIDED))
    },
    "mismatch": {
        f"{made}; {label}": Variant(
            structs.replace(OBJECTIVE, name=name, behaviour=behaviour), old=old, engine=engine
        )
        for made, engine in ENGINES.items()
        for label, (name, behaviour, old) in CORRECTIONS.items()
    },
}


@dataclass
class Curve:
    """Figures of one training, step by step."""

    reward: list[float]
    """Mean task reward of everything generated for the step."""
    effective_share: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)

    @property
    def final(self) -> float:
        return statistics.fmean(self.reward[-TAIL:])

    @property
    def collapsed(self) -> bool:
        """Whether the policy was once more than twice as good as at the end."""
        ends = range(min(TAIL, len(self.reward)), len(self.reward) + 1)
        best = max(statistics.fmean(self.reward[max(0, end - TAIL) : end]) for end in ends)
        return self.final < best / 2


def learn(base: Path, seed: int, variant: Variant, steps: int) -> Curve:
    """Train from the policy in `base`; groups without a spread of rewards are left out."""
    environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
    settings = variant.settings(seed, steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(base, folder / "0")
        learner = Learner(folder / "0", settings)
        sampler = Sampler(
            folder / "0", [environment], SAMPLING, engine=variant.engine, spread_only=True
        )
        schedule = settings.schedule
        rewards, metrics = train(learner, sampler, folder, seed, schedule, name="study")
    return Curve(
        rewards,
        [each.get("effective_share", 1.0) for each in metrics],
        [each.get("gradient_norm", 0.0) for each in metrics],
    )


def band(curves: Sequence[Sequence[float]], points: int = 20) -> dict[str, list[float]]:
    """Mean, minimum and maximum over seeds at `points` points of the curves, rounded."""
    steps = len(curves[0])
    places = sorted({round((steps - 1) * point / max(1, points - 1)) for point in range(points)})
    columns = [[curve[place] for curve in curves] for place in places]
    return {
        "step": [float(place) for place in places],
        "mean": [round(statistics.fmean(column), 4) for column in columns],
        "low": [round(min(column), 4) for column in columns],
        "high": [round(max(column), 4) for column in columns],
    }


def summary(curves: Sequence[Curve]) -> dict[str, Any]:
    """Figures of one variant over its seeds."""
    norms = sorted(norm for curve in curves for norm in curve.gradient_norm)
    shares = [share for curve in curves for share in curve.effective_share]
    return {
        **spread("final_reward", [curve.final for curve in curves], 4),
        "effective_share_mean": round(statistics.fmean(shares), 4),
        "gradient_norm_median": norms[len(norms) // 2],
        "gradient_norm_p99": norms[min(len(norms) - 1, int(len(norms) * 0.99))],
        "gradient_norm_max": norms[-1],
        "collapse_rate": sum(curve.collapsed for curve in curves) / len(curves),
        "curve": band([curve.reward for curve in curves]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=at_least(1), default=2, help="how many seeds, from 0")
    parser.add_argument("--steps", type=at_least(1), default=100)
    parser.add_argument("--only", default="", help="variants whose names begin so")
    given = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {**vars(given), "load_average": load_average(), "variants": {}}
    began = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        bases = [Path(name) / str(seed) for seed in range(given.seeds)]
        for seed, base in enumerate(bases):
            prepare_base(base, seed)
        for label, variant in STUDIES[given.study].items():
            if not label.startswith(given.only):
                continue
            curves = [learn(base, seed, variant, given.steps) for seed, base in enumerate(bases)]
            report["variants"][label] = summary(curves)
    print_json({**report, "cpu_seconds": round(time.process_time() - began, 1)})


if __name__ == "__main__":
    main()
