"""The work contract: typed requests and replies of every service that runs in a child process.

One `Protocol` per service. A role calls a client of it (`InferenceClient`), the child's service
implements it, and so does the simulator's cost model: a changed field is a type error in all three.
Paths are absolute and name files on this machine.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import msgspec

from swarm.messages import (
    Check,
    CheckpointReference,
    Digest,
    EnvironmentReference,
    Rewards,
    Sampling,
    Thresholds,
)
from swarm.rollouts.seeds import submission_seed
from swarm.world import Child, Job

LOAD_PATIENCE_SECONDS = 600.0
"""Reading weights reports nothing on its way: 60 GB from a disk of 100 MB/s."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every reply."""


class SubmissionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What fixes one submission: its prompts, its noise and its header follow from these fields."""

    run: str
    policy: CheckpointReference
    step: int
    nonce: bytes
    """The step order's."""
    worker: str
    """Peer id."""
    number: int
    """Consecutive from 0 within the step."""
    groups: int
    environments: list[EnvironmentReference]
    """The run's; each group's follows from the seed by their weights."""
    sampling: Sampling

    def seed(self) -> bytes:
        """Seed of every prompt and of all noise in the submission."""
        return submission_seed(self.run, self.nonce, self.worker, self.number)

    def rows(self) -> int:
        """Completions in the submission."""
        return self.groups * self.sampling.group_size


# --- inference -------------------------------------------------------------------------------


class Load(Job, frozen=True, kw_only=True):
    """Load the policy in a Hugging Face folder."""

    patience_seconds: ClassVar[float] = LOAD_PATIENCE_SECONDS

    policy: CheckpointReference
    folder: str


class Loaded(Reply, frozen=True, kw_only=True):
    seconds: float


class Probe(Job, frozen=True, kw_only=True):
    """Render an environment's 64 probe tasks with the loaded policy's tokenizer."""

    patience_seconds: ClassVar[float] = 600.0
    """An environment may fetch or build its data when it draws its first task."""

    environment: EnvironmentReference


class Probed(Reply, frozen=True, kw_only=True):
    digest: Digest
    """Of the rendered token ids: `EnvironmentReference.probe_hash` where both sides agree."""


class Generate(Job, frozen=True, kw_only=True):
    """Generate one submission with its proofs and write it, durably, to `path`."""

    patience_seconds: ClassVar[float] = 600.0
    """The longest decoding step of a large model on a busy machine takes seconds; building all
    proofs and writing the file report nothing on their way."""

    order: SubmissionOrder
    path: str


class Generated(Reply, frozen=True, kw_only=True):
    digest: Digest
    """BLAKE3-256 of the file."""
    size_bytes: int
    groups: int
    tokens: int
    """Completion tokens."""
    finished_share: float
    """Share of completions that ended with a stop token."""
    seconds_generate: float
    seconds_proofs: float
    seconds_write: float


class InferenceService(Protocol):
    """Generates submissions with one policy at a time."""

    async def load(self, job: Load) -> Loaded:
        """Raises `UserError` for a folder that holds no supported model."""
        ...

    async def probe(self, job: Probe) -> Probed:
        """Raises `UserError` for an environment that is not installed."""
        ...

    async def generate(self, job: Generate) -> Generated:
        """Raises `ValueError` when another policy is loaded or the model cannot hold prompt and
        completion, `UserError` for an environment that is not installed."""
        ...


class InferenceClient:
    """Calls the `InferenceService` in a child."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def load(self, job: Load) -> Loaded:
        return await self._child.request("load", job, Loaded)

    async def probe(self, job: Probe) -> Probed:
        return await self._child.request("probe", job, Probed)

    async def generate(self, job: Generate) -> Generated:
        return await self._child.request("generate", job, Generated)


_INFERENCE: type[InferenceService] = InferenceClient


# --- checking --------------------------------------------------------------------------------


class Report(Reply, frozen=True, kw_only=True):
    """The results of a series of checks."""

    checks: list[Check]
    """Up to the first that failed; all, where their figures come together."""
    failed: str = ""
    """Name of the check that failed; empty if none has."""
    detail: str = ""
    """One sentence on that."""
    proven_fault: bool = False
    """Anyone can recompute the fault exactly from signed bytes."""
    quarantined: bool = False
    """The failure is no fault of the worker."""


class Inspect(Job, frozen=True, kw_only=True):
    """Judge a submission's file by everything that needs no policy."""

    patience_seconds: ClassVar[float] = 60.0
    """The hostile file is given up after 30 s; then each group is graded, and reported."""

    order: SubmissionOrder
    path: str
    digest: Digest
    """BLAKE3-256 of the file at `path`, as announced."""
    canonical_path: str
    """Where to write the rollouts in canonical form."""
    tokenizer_folder: str
    """Hugging Face folder of the policy."""
    bytes_max: int
    """Largest file that is read."""


class Inspected(Report, frozen=True, kw_only=True):
    """All but the report is empty when a check failed."""

    rewards: Rewards = []
    """[groups][G]; empty where the environment cannot grade."""
    task_means: list[float] = []
    """[groups] Mean reward without the length penalty; empty: there is no penalty."""
    task_spreads: list[float] = []
    """[groups] Likewise largest less smallest."""
    environments: list[int] = []
    """[groups] Index among the run's environments."""
    ungraded: str = ""
    """Why the environment cannot grade. The tokens tell whose fault that is."""
    group_digests: list[Digest] = []
    """[groups] BLAKE3-256 of each group's prompt and completions."""
    canonical_digest: bytes = b""
    """BLAKE3-256 of the rollouts in canonical form."""
    tokens: int = 0
    """Completion tokens."""


class InspectionService(Protocol):
    """Judges what needs no policy."""

    async def inspect(self, job: Inspect) -> Inspected:
        """An environment that is not installed or draws no task fails the check "environment".

        Raises `UserError` when the tokenizer is missing, `OSError` when the file is missing or its
        hash differs.
        """
        ...


class InspectionClient:
    """Calls the `InspectionService` in a child."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def inspect(self, job: Inspect) -> Inspected:
        return await self._child.request("inspect", job, Inspected)


_INSPECTION: type[InspectionService] = InspectionClient


class PoliciesLoaded(Reply, frozen=True, kw_only=True):
    policies: list[CheckpointReference]
    """All that are held now, the least recently used first."""


class Judge(Job, frozen=True, kw_only=True):
    """Judge canonical rollouts by the activations and logits of their policy."""

    patience_seconds: ClassVar[float] = 600.0
    """Prefill reports after each batch; one of a large model on a busy CPU takes minutes."""

    order: SubmissionOrder
    path: str
    """Of the canonical rollouts."""
    digest: Digest
    """Their BLAKE3-256."""
    thresholds: Thresholds
    rows: list[int] | None = None
    """Judge only these; None: all."""


class Judged(Report, frozen=True, kw_only=True):
    """Means are over the chunks; a chunk is what one proof covers."""

    chunks: int
    chunks_passed: int
    exponents_min: int
    exponents_mean: float
    mantissa_mean_max: float
    tokens: int
    positions: int
    """Tokens where the policy left a choice."""
    mismatches: int
    """Of those, tokens that are not what the seed gives."""
    margin_mean: float
    """Mean of min(margin, 1) over `positions`."""
    margin_max: float
    """Over all tokens."""


class PrefillService(Protocol):
    """Recomputes what a policy would have done; holds the last few policies used."""

    async def load(self, job: Load) -> PoliciesLoaded:
        """Raises `UserError` for a folder that holds no supported model."""
        ...

    async def judge(self, job: Judge) -> Judged:
        """Raises `ValueError` when the policy is not loaded, `OSError` when the file's hash
        differs."""
        ...


class PrefillClient:
    """Calls the `PrefillService` in a child."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def load(self, job: Load) -> PoliciesLoaded:
        return await self._child.request("load", job, PoliciesLoaded)

    async def judge(self, job: Judge) -> Judged:
        return await self._child.request("judge", job, Judged)


_PREFILL: type[PrefillService] = PrefillClient
