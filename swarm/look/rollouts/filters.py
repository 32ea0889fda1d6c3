"""Which rollouts to show: filters by environment, reward, worker and step."""

import math
from dataclasses import dataclass

from swarm.errors import UserError
from swarm.look.rollouts.seen import SeenRollout

Range = tuple[float, float]


@dataclass(frozen=True)
class Filters:
    """A rollout must pass all that are given; bounds are inclusive."""

    environment: str | None = None
    reward: Range | None = None
    worker: str | None = None
    """A peer id, or its beginning or end."""
    step: Range | None = None

    def accepts_submission(self, step: int, worker: str) -> bool:
        """Whether a submission can hold rollouts that pass."""
        if self.step is not None and not self.step[0] <= step <= self.step[1]:
            return False
        return self.worker is None or worker.startswith(self.worker) or worker.endswith(self.worker)

    def accepts(self, seen: SeenRollout) -> bool:
        """Whether a rollout passes. One without a verdict has no reward."""
        if self.environment not in (None, seen.environment):
            return False
        if self.reward is None:
            return True
        return seen.reward is not None and self.reward[0] <= seen.reward <= self.reward[1]


def parse_range(option: str, text: str | None, example: str) -> Range | None:
    """Read `LOW:HIGH`, `LOW:`, `:HIGH` or one number; raises `UserError`."""
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        first = float(low) if low else -math.inf
        last = (float(high) if high else math.inf) if colon else first
    except ValueError:
        first, last = math.nan, math.nan
    if not text.strip(":") or not first <= last:
        raise UserError(
            f"{option} is {text!r}; it must be two numbers in order with a colon, like {example}"
        )
    return first, last
