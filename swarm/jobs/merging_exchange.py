"""Jobs of the exchange between an RL trainer and the replica that merges its policy with others.

Both run on one machine, or share a disk. They exchange weights in fp32 through one folder:

    replica.json    the replica is there, and wants a snapshot after so many steps
    snapshot-N/     the RL trainer's policy at some step
    answer-N/       the change that the merge of that snapshot with others makes to the policy

Every folder appears complete or not at all. Snapshots are numbered from 1; the RL trainer hands out
the next one after it has adopted the answer to the one before. It adds the change to whatever its
weights are by then, so it never waits.
"""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from swarm.jobs import LoadingJob, SavingJob
from swarm.wire.manifest import Compression

# --- the replica's side --------------------------------------------------------------------------


class StartExchange(LoadingJob, frozen=True, kw_only=True):
    """Load the model's shapes, and announce the replica in the exchange folder; the first job."""

    model: str
    """A Hugging Face folder: policy 0 of every RL trainer that merges."""
    exchange: str
    inner_steps: Annotated[int, Meta(ge=1)]
    """RL steps between two snapshots."""
    compression: Compression
    number: int
    """The highest number of a snapshot that this replica has answered or contributed."""


class ExchangeStarted(msgspec.Struct, frozen=True, kw_only=True):
    parameters: int
    contribution_bytes_max: int


class LookForSnapshot(LoadingJob, frozen=True, kw_only=True):
    """Look for the newest snapshot in the exchange folder."""


class SnapshotSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The newest snapshot."""

    number: int = 0
    """0: there is none."""
    adopted: int = 0
    """Number of the newest answer that its weights include; 0: none."""
    steps: int = 0
    """RL steps since the snapshot before: its weight in the merge."""
    answered: bool = False
    problem: str = ""
    """One sentence if it cannot be merged."""


class KeepAnchor(SavingJob, frozen=True, kw_only=True):
    """Keep an outer state as the anchor, for a policy whose own anchor this replica lacks."""

    state: str
    keep: str
    """Folder to keep it in."""


class ContributeSnapshot(SavingJob, frozen=True, kw_only=True):
    """Write the contribution of a snapshot: the anchor's weights minus the snapshot's."""

    number: int
    anchor: str
    """Folder of the outer state that the policy has adopted last."""
    contribution: str
    """Folder to write the contribution to."""


class AnswerSnapshot(SavingJob, frozen=True, kw_only=True):
    """Answer a snapshot with the change from its anchor to an outer state.

    What the policy has contributed is subtracted, since its weights have it already. So what
    compression left out stays in the policy. The anchor is kept first, then the answer appears.
    """

    number: int
    state: str
    """Folder of the outer state that the policy adopts."""
    anchor: str = ""
    """Folder of the outer state that it has adopted last; empty: the snapshot itself, so that the
    policy takes over the outer state."""
    contribution: str = ""
    """Folder of its own contribution, if that was merged since."""
    keep: str
    """Folder to keep the adopted state in, as the next anchor."""
    round: int
    trainers: int
    """Other trainers that have contributed since the anchor; 0: the change is nil."""


class RefuseSnapshot(SavingJob, frozen=True, kw_only=True):
    """Answer a snapshot with the reason why it was not merged."""

    number: int
    problem: str


class ExchangeService(Protocol):
    """The part of the child's service that a replica without inner steps uses besides the jobs of
    `OuterService` that compute from files."""

    async def start_exchange(self, job: StartExchange) -> ExchangeStarted:
        """Raises `UserError` for a model that cannot be merged."""
        ...

    async def look_for_snapshot(self, job: LookForSnapshot) -> SnapshotSeen: ...

    async def contribute_snapshot(self, job: ContributeSnapshot) -> str:
        """One sentence if the snapshot cannot be contributed; else empty."""
        ...

    async def keep_anchor(self, job: KeepAnchor) -> None: ...

    async def answer_snapshot(self, job: AnswerSnapshot) -> str:
        """One sentence if the change could not be computed, and there is no answer; else empty."""
        ...

    async def refuse_snapshot(self, job: RefuseSnapshot) -> None: ...
