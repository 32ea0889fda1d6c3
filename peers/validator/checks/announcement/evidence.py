"""The evidence of the checks of an announcement: what it says, and what the run says."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.envelope import Envelope
from swarm.messages import RunManifest, StepOrder, Submission
from swarm.run.run import Run


@dataclass(frozen=True)
class Announcement:
    """A submission that was announced, and all that this validator knows about it."""

    worker: str
    submission: Submission
    admission: Envelope | None
    """As the worker shows it."""
    run: Run
    manifest: RunManifest
    """The one that the submission's step follows."""
    order: StepOrder | None
    """Of the submission's step; None if no such step is known."""
    newest_order: StepOrder | None
    slot_taken_by: bytes | None
    """Digest of the file that was delivered first under the worker's number."""
    pushed_bytes: int | None
    """Size of the file that the worker has pushed; None if there is none."""
    wall_time: float

    @property
    def step_order(self) -> StepOrder:
        """The order, for checks that run after `step`."""
        assert self.order is not None
        return self.order
