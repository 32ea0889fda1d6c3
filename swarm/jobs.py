"""The work contract: typed requests and replies of every service that runs in a child process.

Each service is a `Protocol` and a `Setup`. The service in the child and the simulator's cost model
implement both, and the role's client (`swarm.world.client`) has the protocol's methods, so a
changed field is a type error in all three.
Paths are absolute and name files on this machine.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

import msgspec

from swarm.messages import (
    Check,
    CheckpointReference,
    Digest,
    EnvironmentReference,
    Objective,
    Optimiser,
    Rewards,
    Sampling,
    Schedule,
    Thresholds,
)
from swarm.rollouts.seeds import environment_of_group, submission_seed
from swarm.world import Job, Setup

LOAD_PATIENCE_SECONDS = 600.0
"""Time for reading weights, which reports no progress: 60 GB from a disk of 100 MB/s."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every reply."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware a service computes on, from the settings (`swarm.settings.ComputeSettings`)."""

    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1


class SubmissionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that determine one submission's prompts, noise and header."""

    run: str
    policy: CheckpointReference
    step: int
    nonce: bytes
    """The step order's nonce."""
    worker: str
    """Peer id."""
    number: int
    """Consecutive from 0 within the step."""
    groups: int
    environments: list[EnvironmentReference]
    """The run's environments; the seed and their weights determine the one of each group."""
    sampling: Sampling

    def seed(self) -> bytes:
        """The seed of all prompts and noise in the submission."""
        return submission_seed(self.run, self.nonce, self.worker, self.number)

    def environments_of_groups(self) -> list[int]:
        """[groups] Index of each group's environment; empty if the run has only one."""
        if len(self.environments) == 1:
            return []
        weights = [environment.weight for environment in self.environments]
        seed = self.seed()
        return [environment_of_group(seed, group, weights) for group in range(self.groups)]

    def rows(self) -> int:
        """Completions in the submission."""
        return self.groups * self.sampling.group_size


# --- inference -------------------------------------------------------------------------------


class InferenceSetup(Setup, frozen=True, kw_only=True):
    engine: str = "native"
    hardware: Hardware = Hardware()
    alter_weights: float = 0.0
    """Size of the noise added to all weights after loading, relative to each tensor's norm. The
    demo's cheater uses it."""
    environments: list[EnvironmentReference]


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
    """Covers an environment that fetches or builds its data when it draws its first task."""

    environment: EnvironmentReference


class Probed(Reply, frozen=True, kw_only=True):
    digest: Digest
    """BLAKE3-256 of the rendered token ids; it must equal `EnvironmentReference.probe_hash`."""


class Generate(Job, frozen=True, kw_only=True):
    """Generate one submission with its proofs and write it durably to `path`."""

    patience_seconds: ClassVar[float] = 3600.0
    """The native engine reports each decoding step, but an engine of another package may report
    nothing until the whole submission is done."""

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
        """Raises `ValueError` when another policy is loaded or an episode exceeds the model's
        context length, `UserError` for an environment that is not installed."""
        ...


# --- checking --------------------------------------------------------------------------------


class InspectionSetup(Setup, frozen=True, kw_only=True):
    environments: list[EnvironmentReference]


class PrefillSetup(Setup, frozen=True, kw_only=True):
    policies_kept: int = 2
    """Number of policies kept in memory."""
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
    """Run all checks of a submission's file that need no policy."""

    patience_seconds: ClassVar[float] = 60.0
    """Reading the hostile file is given up after 30 s; grading reports progress."""

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


class Inspected(Report, kw_only=True):
    """The report, and the results for training, which are empty if a check failed."""

    rewards: Rewards = []
    """[groups][G] Empty if the environment cannot grade."""
    task_means: list[float] = []
    """[groups] Mean reward without the length penalty; empty if there is no penalty."""
    task_spreads: list[float] = []
    """[groups] Largest minus smallest reward without the penalty; empty if there is none."""
    environments: list[int] = []
    """[groups] Index among the run's environments; empty if the run has only one."""
    ungraded: str = ""
    """Why the environment cannot replay or grade. The sampling checks decide whether the worker is
    at fault."""
    group_digests: list[Digest] = []
    """[groups] BLAKE3-256 of each group's prompt and completions."""
    canonical_digest: bytes = b""
    """BLAKE3-256 of the rollouts in canonical form."""
    canonical_bytes: int = 0
    tokens: int = 0
    """Completion tokens."""


class InspectionService(Protocol):
    """Runs the checks of a file that need no policy."""

    async def inspect(self, job: Inspect) -> Inspected:
        """An environment that is not installed or draws no task fails the check "environment".

        Raises `UserError` when the tokenizer is missing, `OSError` when the file is missing or its
        hash differs.
        """
        ...


class PoliciesLoaded(Reply, frozen=True, kw_only=True):
    policies: list[CheckpointReference]
    """All policies in memory, the least recently used first."""


class Judge(Job, frozen=True, kw_only=True):
    """Check canonical rollouts against the activations and logits of their policy."""

    patience_seconds: ClassVar[float] = 600.0
    """Prefill reports progress per batch; a batch of a large model on a busy CPU takes minutes."""

    order: SubmissionOrder
    path: str
    """File of the canonical rollouts."""
    digest: Digest
    """BLAKE3-256 of that file."""
    thresholds: Thresholds
    rows: list[int] | None = None
    """Rows to check; None: all."""


class Judged(Report, kw_only=True):
    """The report, and its figures. Means are over chunks; one proof covers one chunk."""

    chunks: int
    chunks_passed: int
    exponents_min: int
    exponents_mean: float
    mantissa_mean_max: float
    tokens: int
    positions: int
    """Tokens for which p_max < 0.99, so that the policy left a choice."""
    mismatches: int
    """Tokens among `positions` that differ from the recomputed sample."""
    margin_mean: float
    """Mean of min(margin, 1) over `positions`."""
    margin_max: float
    """Largest margin of all tokens."""


class PrefillService(Protocol):
    """Recomputes activations and sampling; keeps the last few policies used in memory."""

    async def load(self, job: Load) -> PoliciesLoaded:
        """Raises `UserError` for a folder that holds no supported model."""
        ...

    async def judge(self, job: Judge) -> Judged:
        """Raises `ValueError` when the policy is not loaded, `OSError` when the file's hash
        differs."""
        ...


# --- training --------------------------------------------------------------------------------

TRAINING_PATIENCE_SECONDS = 1800.0
"""The learner reports progress per forward and backward pass; ranks wait up to 600 s for each
other."""

SAVE_PATIENCE_SECONDS = 4200.0
"""Writing a state reports no progress; ranks wait up to 3,600 s for each other's disks."""

Figures = dict[str, int | float]


class TrainingSetup(Setup, frozen=True, kw_only=True):
    hardware: Hardware = Hardware()


class Done(Reply, frozen=True, kw_only=True):
    """The reply of a job without a result."""


class Lessons(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a run manifest that the learner needs."""

    objective: Objective
    optimiser: Optimiser
    schedule: Schedule
    sampling: Sampling


class Sharding(msgspec.Struct, frozen=True, kw_only=True):
    """How the policy is distributed over ranks and memory."""

    replicas: int = 1
    """Whole copies of the policy; each is sharded over an equal share of the ranks."""
    mixed_precision: bool = False
    """Compute in bf16; reduce gradients and keep weights in fp32."""
    activation_checkpointing: bool = False
    """Keep only the layers' inputs, and recompute the rest in the backward pass."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimiser state in main memory."""


class StartTraining(Job, frozen=True, kw_only=True):
    """Begin a run with a Hugging Face folder as policy 0."""

    patience_seconds: ClassVar[float] = LOAD_PATIENCE_SECONDS

    model: str
    lessons: Lessons
    environments: list[EnvironmentReference]
    seed: int
    sharding: Sharding = Sharding()
    dtype: str = "auto"
    """As `Hardware.dtype`; bfloat16 applies to the forward and backward passes."""
    attention: str = "fastest"
    """One of `peers.trainer.learning.packing.ATTENTIONS`."""


class Resume(Job, frozen=True, kw_only=True):
    """Continue from a saved training state."""

    patience_seconds: ClassVar[float] = SAVE_PATIENCE_SECONDS
    """Reading a state takes as long as writing it."""

    start: StartTraining
    folder: str
    """The folder that `BeginSave` wrote."""
    policies: dict[int, str]
    """Published Hugging Face folders by step."""


class Resumed(Reply, frozen=True, kw_only=True):
    step: int
    consumed: list[Digest]
    """Digests of consumed submissions that are recent enough to be offered again."""


class Follow(Job, frozen=True, kw_only=True):
    """Follow another version of the run from the next step on."""

    patience_seconds: ClassVar[float] = 60.0
    """Only numbers change."""

    lessons: Lessons
    environments: list[EnvironmentReference]
    """Their weights may have changed."""


class RollBack(Job, frozen=True, kw_only=True):
    """Continue from an older state as a new lineage, which inherits the consumed list."""

    patience_seconds: ClassVar[float] = SAVE_PATIENCE_SECONDS

    folder: str
    policies: dict[int, str]
    lineage: int


class AcceptedSubmission(msgspec.Struct, frozen=True, kw_only=True):
    """A submission to train on."""

    digest: Digest
    """The submission's name."""
    path: str
    """File of its rollouts in canonical form."""
    rollouts_digest: Digest
    """BLAKE3-256 of the file at `path`."""
    policy: int
    """Step of the policy that generated it."""
    rewards: Rewards
    """[groups][G] Computed by the validator."""
    sampling: Sampling
    """The settings it was generated with."""
    kept: list[bool]
    """[groups] False if the online filter excludes the group."""


class TrainStep(Job, frozen=True, kw_only=True):
    """Take one rollout step."""

    patience_seconds: ClassVar[float] = TRAINING_PATIENCE_SECONDS

    step: int
    submissions: list[AcceptedSubmission]


class Unreadable(msgspec.Struct, frozen=True, kw_only=True):
    """A submission that this machine cannot read."""

    index: int
    """Index among the job's submissions."""
    reason: str


class Trained(Reply, frozen=True, kw_only=True):
    """The result of a step. If a submission is unreadable, no training happened."""

    figures: Figures = {}
    """The learner's metrics."""
    outcomes: list[list[Literal["consumed", "zero-advantage"]]] = []
    """[submissions][groups]"""
    unreadable: list[Unreadable] = []


class BeginSave(Job, frozen=True, kw_only=True):
    """Copy the whole state that an exact resume needs, and begin to write it."""

    patience_seconds: ClassVar[float] = SAVE_PATIENCE_SECONDS

    folder: str


class FinishSave(Job, frozen=True, kw_only=True):
    """Wait until the state of `BeginSave` is durable."""

    patience_seconds: ClassVar[float] = SAVE_PATIENCE_SECONDS


class Export(Job, frozen=True, kw_only=True):
    """Write the policy as a plain Hugging Face folder, durably."""

    patience_seconds: ClassVar[float] = SAVE_PATIENCE_SECONDS

    folder: str


class Evaluate(Job, frozen=True, kw_only=True):
    """Measure a published policy on tasks of a split."""

    patience_seconds: ClassVar[float] = TRAINING_PATIENCE_SECONDS

    folder: str
    prompts: int
    split: Literal["train", "held_out"]


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Mean rewards of one policy."""

    sampled: float
    """Mean reward when sampling as for the run's rollouts."""
    greedy: float
    """Mean reward when always taking the likeliest token."""


class Evaluated(Reply, frozen=True, kw_only=True):
    """Mean rewards, averaged over the environments by their weights."""

    sampled: float
    greedy: float
    environments: dict[str, Accuracy] = {}
    """By label, for each environment with a positive weight."""


class PrepareBase(Job, frozen=True, kw_only=True):
    """Make the demo's base policy: random weights and a short supervised warm-up."""

    patience_seconds: ClassVar[float] = TRAINING_PATIENCE_SECONDS

    folder: str
    seed: int


class BasePrepared(Reply, frozen=True, kw_only=True):
    sft_steps: int
    sampled: float
    """Mean reward on held-out prompts."""
    greedy: float


class RecordTo(Job, frozen=True, kw_only=True):
    """Choose where `Record` writes."""

    patience_seconds: ClassVar[float] = 300.0
    """Covers a request to Weights & Biases over a slow network."""

    tensorboard: str
    """Folder; empty for no TensorBoard."""
    wandb: str
    """Project; empty for no Weights & Biases."""
    run: str
    lessons: Lessons
    """Recorded as the run's configuration."""
    peak_flops: float
    """Peak FLOP/s of one device; 0 looks it up by the device's name."""


class Recording(Reply, frozen=True, kw_only=True):
    ranks: int
    """Processes that train together."""


class Record(Job, frozen=True, kw_only=True):
    """Write one step's metrics."""

    patience_seconds: ClassVar[float] = 300.0

    step: int
    figures: Figures
    environment_rewards: dict[str, float]
    """Mean reward by the environment's label."""


class EndTraining(Job, frozen=True, kw_only=True):
    """Let the other ranks end, because the run is over."""

    patience_seconds: ClassVar[float] = 60.0


class TrainingService(Protocol):
    """Holds the learner. Folders and files are on a disk that every rank can access."""

    async def record_to(self, job: RecordTo) -> Recording:
        """Raises `UserError` when a library is missing or a recorder fails to start."""
        ...

    async def prepare_base(self, job: PrepareBase) -> BasePrepared: ...

    async def start(self, job: StartTraining) -> Done:
        """Raises `UserError` for a model or a setting that cannot be trained."""
        ...

    async def resume(self, job: Resume) -> Resumed: ...

    async def follow(self, job: Follow) -> Done: ...

    async def train(self, job: TrainStep) -> Trained: ...

    async def record(self, job: Record) -> Done: ...

    async def begin_save(self, job: BeginSave) -> Done: ...

    async def finish_save(self, job: FinishSave) -> Done: ...

    async def export(self, job: Export) -> Done: ...

    async def evaluate(self, job: Evaluate) -> Evaluated: ...

    async def roll_back(self, job: RollBack) -> Done: ...

    async def end(self, job: EndTraining) -> Done: ...
