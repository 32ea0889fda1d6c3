"""How far a run has come: its lineage, its newest policy, and what follows from both."""

from __future__ import annotations

from collections.abc import Iterable

from swarm.envelope import Envelope
from swarm.messages import RunManifest, StepOrder, Verdict
from swarm.observable import Observable
from swarm.run.manifest import manifest_in
from swarm.run.run import Run

STEPS_REMEMBERED = 512
"""Steps whose version of the run is remembered: rollouts of the last `max_staleness` (at most 256)
may still be trained on, and a few more steps are open."""


class FollowedVersions:
    """The run manifest that each step of a lineage follows.

    It is the newest when the step was opened, or when its batch was begun.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._followed: dict[int, Envelope] = {}
        """Of the last `STEPS_REMEMBERED` steps."""

    def follow(self, step: int) -> Envelope:
        """The run manifest that a step follows, fixed by this call at the latest."""
        followed = self._followed.setdefault(step, self._run.manifest_envelope)
        while len(self._followed) > STEPS_REMEMBERED:
            del self._followed[min(self._followed)]
        return followed

    def manifest_of(self, step: int) -> RunManifest:
        """The run manifest that a step follows; the newest, if it was not opened yet."""
        return manifest_in(self._followed.get(step, self._run.manifest_envelope))

    def restore(self, orders: Iterable[StepOrder]) -> None:
        """Take over what the orders of an earlier life say."""
        for order in orders:
            followed = self._run.version(order.run_digest)
            if followed is not None:
                self._followed[order.step] = followed

    def clear(self) -> None:
        """Forget the steps of a lineage that is given up."""
        self._followed.clear()


class Progress:
    """The lineage and the newest published policy."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.versions = FollowedVersions(run)
        self.lineage = 0
        self.policy = -1
        """Newest policy published, which is also the step in work."""
        self.training_groups = 0
        """Groups of the batch in training, which are not in the pool any more."""
        self.changed = Observable(0)
        """Changes with the pool, the forecast, the policy, a pause, and the run's version."""
        self._oldest_policy = 0

    @property
    def over(self) -> bool:
        """Every step of the run is done; a new version of the run may move its end."""
        return self.policy >= self._run.manifest.schedule.steps

    def reach(self, policy: int) -> None:
        """Policy `policy` of this lineage is published."""
        if policy < self.policy:  # rolled back: its rollouts are as young as ever
            self._oldest_policy = 0
        self.training_groups = 0
        self.policy = policy

    def oldest_policy(self) -> int:
        """The oldest policy of this lineage that may be trained on.

        It never goes back, whatever a new version of the run makes of `max_staleness`: what was
        dropped as too old stays so.
        """
        staleness = self.versions.manifest_of(self.policy).schedule.max_staleness
        self._oldest_policy = max(self._oldest_policy, self.policy - staleness)
        return self._oldest_policy

    def too_old(self, verdict: Verdict) -> bool:
        """Whether it may no longer be trained on; nor may what an evicted peer has made."""
        if verdict.lineage != self.lineage or self._run.evicted(verdict.worker) is not None:
            return True
        return verdict.policy < self.oldest_policy()
