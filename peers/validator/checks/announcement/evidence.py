"""The evidence of the checks of an announcement."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.envelope import Envelope
from swarm.messages import RunManifest, StepOrder, Submission
from swarm.run.run import Run


@dataclass(frozen=True)
class Announcement:
    """An announced submission, and this validator's knowledge about it."""

    worker: str
    submission: Submission
    admission: Envelope | None
    """The admission that the worker presents."""
    run: Run
    manifest: RunManifest
    """The version of the manifest that the submission's step follows."""
    order: StepOrder | None
    """The order of the submission's step; None if the step is unknown."""
    newest_order: StepOrder | None
    slot_taken_by: bytes | None
    """Digest of the file that was delivered first under the worker's submission number."""
    pushed_bytes: int | None
    """Size of the file that the worker pushed; None if it pushed none."""
    wall_time: float

    @property
    def step_order(self) -> StepOrder:
        """The order of the submission's step, for checks that run after the check `step`."""
        assert self.order is not None
        return self.order
