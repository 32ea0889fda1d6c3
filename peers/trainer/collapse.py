"""Alarms: signs in a run's metrics that it goes wrong, raised before its reward collapses.

INTELLECT-2 (arXiv 2505.07291, §3.5) saw the gradient norm and the share of clipped tokens creep
up, and the entropy rise again after its fall, steps before the policy collapsed. Every figure is
the mean of the last few steps, so one bad batch raises no alarm."""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Action = Literal["recover", "report", "pause", "rollback"]

RECENT_STEPS = 5
"""Number of newest steps; their mean is compared with the limits."""

HISTORY_STEPS = 50
"""Number of steps before those; their median is the usual figure."""

HISTORY_STEPS_MIN = 10
"""Alarms that compare with a median need at least this many such steps."""

NOISE_ERRORS = 3.0
"""A reward has collapsed when it is at least so many standard errors below the best."""

UNREWARDED_STEPS = 10
"""Steps from the first on whose reward is 0, after which that is reported."""

UNREWARDED = "no_reward"
"""Name of that alarm. It is only reported: neither a pause nor an earlier state helps."""
COLLAPSE = "reward"

_WORDS = {
    "gradient_norm": "the gradient norm climbs",
    "clipped_share": "more and more tokens are clipped",
    "entropy": "the entropy rises again",
    "skipped_share": "optimiser steps are skipped because numbers are not finite",
}


UNREWARDED_ADVICE = (
    "the tasks may be too hard for the model, the prompt may not say how to answer, or the grader "
    "may not find the answers: read some with swarm rollouts, and type swarm environment check NAME"
)


@dataclass(frozen=True)
class AlarmLimits:
    """Thresholds of the alarms."""

    gradient_norm: float = 4.0
    """Largest allowed multiple of the gradient norm's median."""
    clipped_share: float = 4.0
    """Largest allowed multiple of the median share of clipped tokens."""
    clipped_share_min: float = 0.05
    """Shares of clipped tokens up to this never raise an alarm."""
    entropy: float = 1.5
    """Largest allowed multiple of the lowest entropy so far."""
    entropy_min: float = 0.1
    """An entropy up to this many nats above the lowest never raises an alarm."""
    reward: float = 0.5
    """Smallest allowed share of the best reward so far."""
    reward_min: float = 0.1
    """A best reward below this is too low to compare with."""
    skipped_share: float = 0.5
    """Largest allowed share of recent optimiser steps skipped for a non-finite loss or gradient."""


@dataclass(frozen=True)
class Alarm:
    """One alarm, with its figure and the limit that the figure crossed."""

    name: str
    figure: float
    limit: float
    sentence: str


class Alarms:
    """Reads every step's metrics, and raises each alarm once until its sign has gone."""

    def __init__(self, limits: AlarmLimits | None = None) -> None:
        self._limits = limits or AlarmLimits()
        self.forget()

    def forget(self) -> None:
        """Forget all steps: an older policy is trained on."""
        self._history: dict[str, deque[float]] = {}
        self._lowest_entropy = float("inf")
        self._best_reward = float("-inf")
        self._ringing: set[str] = set()
        self._rewarded = False
        self.unrewarded_steps = 0
        """Number of all steps so far, if the reward was 0 in each of them; else 0."""

    def look(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """Alarms that this step raises, in a fixed order."""
        clipped = [value for name, value in metrics.items() if name.startswith("clipped_")]
        seen = {
            "gradient_norm": metrics.get("gradient_norm"),
            "clipped_share": sum(clipped) if clipped else None,
            "entropy": metrics.get("entropy"),
            "reward": metrics.get("reward"),
            "skipped_share": metrics.get("skipped"),
        }
        for name, value in seen.items():
            if value is not None and (value == value or name == "gradient_norm"):
                kept = self._history.setdefault(name, deque(maxlen=RECENT_STEPS + HISTORY_STEPS))
                kept.append(value)
        if (reward := metrics.get("reward")) is not None:
            self._rewarded = self._rewarded or reward != 0
            self.unrewarded_steps = 0 if self._rewarded else self.unrewarded_steps + 1
        found = [alarm for alarm in self._signs() if alarm is not None]
        new = [alarm for alarm in found if alarm.name not in self._ringing]
        self._ringing = {alarm.name for alarm in found}
        return new

    def _signs(self) -> list[Alarm | None]:
        limits = self._limits
        lowest, best = self._lowest_entropy, self._best_reward
        clipped = max(limits.clipped_share_min, limits.clipped_share * self._usual("clipped_share"))
        highest = {
            "gradient_norm": limits.gradient_norm * self._usual("gradient_norm"),
            "clipped_share": clipped,
            "entropy": max(limits.entropy * lowest, lowest + limits.entropy_min),
            "skipped_share": limits.skipped_share,
        }
        signs = [self._sign(name, limit) for name, limit in highest.items()]
        if (count := self.unrewarded_steps) >= UNREWARDED_STEPS:
            words = f"the reward was 0 in each of the first {count} steps; {UNREWARDED_ADVICE}"
            signs.append(Alarm(UNREWARDED, 0.0, 0.0, words))
        entropy, reward = self._recent("entropy"), self._recent("reward")
        floor = min(limits.reward * best, best - NOISE_ERRORS * self._error("reward"))
        if reward is not None and best >= limits.reward_min and reward < floor:
            words = f"the reward has collapsed: {reward:.3g}, below {floor:.3g}"
            signs.append(Alarm("reward", reward, floor, words))
        if entropy is not None:
            self._lowest_entropy = min(lowest, entropy)
        if reward is not None:
            self._best_reward = max(best, reward)
        return signs

    def _sign(self, name: str, limit: float) -> Alarm | None:
        figure = self._recent(name)
        if figure is None or figure <= limit:
            return None
        return Alarm(name, figure, limit, f"{_WORDS[name]}: {figure:.3g}, above {limit:.3g}")

    def _recent(self, name: str) -> float | None:
        """Mean of the last `RECENT_STEPS` steps; None while there are fewer."""
        values = list(self._history.get(name, ()))[-RECENT_STEPS:]
        return statistics.fmean(values) if len(values) == RECENT_STEPS else None

    def _error(self, name: str) -> float:
        """Standard error of the mean of `RECENT_STEPS` steps, by the spread of those before.

        Small batches and rare rewards differ by half from chance alone."""
        before = list(self._history.get(name, ()))[:-RECENT_STEPS]
        return statistics.stdev(before) / RECENT_STEPS**0.5 if len(before) > 1 else 0.0

    def _usual(self, name: str) -> float:
        """Median of the steps before those; infinite, which raises no alarm, while too few."""
        before = list(self._history.get(name, ()))[:-RECENT_STEPS]
        return statistics.median(before) if len(before) >= HISTORY_STEPS_MIN else float("inf")
