"""A run's progress: its lineage, its newest policy, and what follows from both."""

from collections.abc import Iterable
from typing import NoReturn

import trio

from swarm.node.run_node import RunNode
from swarm.run.manifest import manifest_in
from swarm.run.run import Run
from swarm.wire.envelope import Envelope
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import CheckpointReference, StepOrder, Verdict
from swarm.world.observable import Observable

STEPS_REMEMBERED = 512
"""Steps whose version of the run is remembered. Rollouts of the last `max_staleness` steps (at most
256) may still be trained on, and a few more steps are open."""

REMINDER_SECONDS = 600.0
"""Seconds between reminders of why the trainer is paused."""


class FollowedVersions:
    """The manifest of each step in a lineage: the newest when it was opened or its batch begun."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._followed: dict[int, Envelope] = {}
        """Signed manifests by step, for the last `STEPS_REMEMBERED` steps."""

    def follow(self, step: int) -> Envelope:
        """The run manifest that a step follows; this call fixes it if nothing did before."""
        followed = self._followed.setdefault(step, self._run.manifest_envelope)
        while len(self._followed) > STEPS_REMEMBERED:
            del self._followed[min(self._followed)]
        return followed

    def manifest_of(self, step: int) -> RunManifest:
        """The run manifest that a step follows; the newest one if the step is not open yet."""
        return manifest_in(self._followed.get(step, self._run.manifest_envelope))

    def restore(self, orders: Iterable[StepOrder]) -> None:
        """Restore the versions from the orders of an earlier process."""
        for order in orders:
            followed = self._run.version(order.run_digest)
            if followed is not None:
                self._followed[order.step] = followed

    def clear(self) -> None:
        """Forget the steps of an abandoned lineage."""
        self._followed.clear()


class Progress:
    """The lineage, its published policies, and the step in work."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.versions = FollowedVersions(run)
        self.lineage = 0
        self.policy = -1
        """Newest policy published in this lineage."""
        self.published: dict[int, CheckpointReference] = {}
        """Policies of this lineage that are, or lately were, on this disk."""
        self.paused = ""
        """Why the open step is closed and training has stopped; empty: it goes on."""
        self.step = 0
        """The step in work; also the number of the policy that the learner holds. It is ahead of
        `policy` while a policy is being saved and published."""
        self.training_groups = 0
        """Groups of the batch in training, which has left the pool."""
        self.changed = Observable(0)
        """Notifies of changes of the pool, forecast, policy, pause or run version."""
        self._oldest_policy = 0

    @property
    def over(self) -> bool:
        """Whether every step of the run is trained; a new version of the run may move its end."""
        return self.step >= self._run.manifest.schedule.steps

    def advance(self, step: int) -> None:
        """Note that the learner holds policy `step`, by training or by loading a state."""
        self.training_groups = 0
        self.step = step

    def begin_lineage(self, lineage: int, step: int) -> None:
        """Begin a lineage with policy `step`, whose rollouts are young again."""
        self.lineage = lineage
        self._oldest_policy = 0
        self.versions.clear()
        self.advance(step)

    def oldest_policy(self) -> int:
        """The oldest policy of this lineage that the step in work may be trained on.

        It never decreases, even when a new version of the run raises `max_staleness`: a submission
        dropped as too old stays too old."""
        staleness = self.versions.manifest_of(self.step).schedule.max_staleness
        self._oldest_policy = max(self._oldest_policy, self.step - staleness)
        return self._oldest_policy

    def too_old(self, verdict: Verdict) -> bool:
        """Whether a submission is too old to be trained on, or its worker evicted."""
        if verdict.lineage != self.lineage or self._run.evicted(verdict.worker) is not None:
            return True
        return verdict.policy < self.oldest_policy()


async def hold(peer: RunNode, progress: Progress, reason: str) -> NoReturn:
    """Pause: close the open step, stop training, and repeat the reason until cancelled."""
    progress.paused = reason
    peer.status.doing = f"paused: {reason}"[:200]
    progress.changed.touch()
    while True:
        peer.node.events.emit("trainer.paused", reason=reason, remedy="restart it with --resume")
        await trio.sleep(REMINDER_SECONDS)
