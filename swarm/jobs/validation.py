"""The services that check submissions: inspection and prefill."""

import math
from typing import ClassVar, Protocol

import msgspec

from swarm.jobs import Hardware, Load, SubmissionOrder
from swarm.wire.manifest import EnvironmentReference, Thresholds
from swarm.wire.messages import Check, CheckpointReference, Digest, Evidence, Rewards
from swarm.world import Job, Setup


class InspectionSetup(Setup, frozen=True, kw_only=True):
    environments: list[EnvironmentReference]


class PrefillSetup(Setup, frozen=True, kw_only=True):
    policies_kept: int = 2
    """Most policies kept in memory; fewer if they do not fit."""
    engine: str = "native"
    hardware: Hardware = Hardware()


class Report(msgspec.Struct, kw_only=True):
    """The results of a series of checks, which the validator extends check by check."""

    checks: list[Check] = []
    """Results up to the first failed check; all results if one computation gives all figures."""
    failed: str = ""
    """Name of the first failed check; empty if none failed."""
    detail: str = ""
    """One sentence about the failure."""
    proven_fault: bool = False
    """Whether anyone can recompute the fault exactly from signed bytes."""
    quarantined: bool = False
    """Whether the failure is not the worker's fault."""


class Inspect(Job, frozen=True, kw_only=True):
    """Run the checks of a submission's file that need no policy and run nothing that depends on
    what the worker wrote. `Grade` may follow."""

    patience_seconds: ClassVar[float] = 60.0
    """Reading the hostile file is given up after 30 s."""

    order: SubmissionOrder
    path: str
    digest: Digest
    """BLAKE3-256 of the file at `path`, as announced."""
    canonical_path: str
    """Where to write the rollouts in canonical form."""
    tokenizer_folder: str
    """Hugging Face folder of the policy."""
    bytes_max: int
    """Size of the largest file that is read."""
    environment_peers: list[str] = msgspec.field(default_factory=list)
    """Peers whose signed turns count."""


class Grade(Job, frozen=True, kw_only=True):
    """Replay and grade the submission that was inspected last."""

    patience_seconds: ClassVar[float] = 60.0
    """Grading reports progress."""

    digest: Digest
    """That of its `Inspect`."""
    grading_seconds: float = math.inf
    """Wall time for all replays and grades. Groups that remain then are ungraded."""
    hung: str = ""
    """Why an earlier grading ended its process. Then nothing is replayed or graded."""


class ServedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that an environment peer has to grade."""

    group: int
    sample: int
    segments: list[list[int]]
    """Token ids."""


class UngradedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that has no rewards because its environment cannot replay or grade it here."""

    group: int
    reason: str
    not_gradable: bool = False
    """Whether the environment works but cannot know a reward, as `reason` says."""


class Inspected(Report, kw_only=True):
    """The report, and what a sound file holds."""

    environments: list[int] = []
    """[groups] Index among the run's environments; empty if the run has only one."""
    group_digests: list[Digest] = []
    """[groups] BLAKE3-256 of each group's prompt and completions."""
    canonical_digest: bytes = b""
    """BLAKE3-256 of the rollouts in canonical form."""
    canonical_bytes: int = 0
    tokens: int = 0
    policies: list[int] = []
    """Policies that the tokens were sampled from, ascending."""


class Graded(Report, kw_only=True):
    """The replays' report, grades of local environments, and episodes to be graded elsewhere."""

    graded: list[list[float]] = []
    """[groups][G] Rewards before length penalties; empty for a group of a served environment."""
    penalties: list[list[float]] = []
    """[groups][G] Length penalties; empty likewise."""
    parts: list[list[dict[str, float]]] = []
    """[groups][G] Parts of the rewards; empty likewise."""
    has_target: bool = False
    """Whether a group's prompt asks for a length."""
    episodes: list[ServedEpisode] = []
    ungraded: list[UngradedGroup] = []


class InspectionService(Protocol):
    """Runs the checks of a file that need no policy."""

    async def inspect(self, job: Inspect) -> Inspected:
        """An environment that is not installed or draws no task fails the check "environment".
        Raises `UserError` without the tokenizer, `OSError` without the file or with another."""

    async def grade(self, job: Grade) -> Graded:
        """Raises `ValueError` when the last submission inspected is another one."""


class Judge(Job, frozen=True, kw_only=True):
    """Check canonical rollouts against the activations and logits of their policy."""

    patience_seconds: ClassVar[float] = 600.0
    """Prefill reports progress per batch; a batch of a large model on a busy CPU takes minutes."""

    order: SubmissionOrder
    path: str
    """File of the canonical rollouts."""
    digest: Digest
    thresholds: Thresholds
    rewards: Rewards
    """[groups][G] The validator's; empty if the environment cannot grade."""
    rows: list[int] | None = None
    """Rows to check; None: all."""
    later: list[Load] = msgspec.field(default_factory=list)
    """The policies of the rollouts, where there are others than the order's. One after the other is
    loaded as it is needed."""


class ProofFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How well the proofs, one per chunk, fit the recomputed states; means are over chunks."""

    chunks: int
    chunks_passed: int
    error_mean: float
    """Mean error of the proofs, 0 to 1."""


class SamplingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How well the tokens fit the recomputed logits and the seed's noise."""

    tokens: int
    mismatches: int
    """Tokens that differ from the recomputed sample."""
    margin_mean: float
    """Mean of min(margin, 1)."""
    margin_max: float


class Judged(Report, kw_only=True):
    """The report, and its figures."""

    proofs: ProofFigures
    sampling: SamplingFigures
    evidence: Evidence
    """What the submission adds to the evidence against its worker."""
    policies: list[CheckpointReference] = []
    """All policies in memory, the least recently used first."""


class PrefillService(Protocol):
    """Recomputes activations and sampling; keeps the last few policies used in memory."""

    async def load(self, job: Load) -> list[CheckpointReference]:
        """All policies in memory, least recently used first. Raises `UserError` for no model."""

    async def judge(self, job: Judge) -> Judged:
        """Raises `ValueError` when a policy is neither loaded nor given, `UserError` for a folder
        that holds no supported model, `OSError` when the file's hash differs."""
