"""The service of the trainer: it holds the learner."""

from typing import ClassVar, Literal, Protocol

import msgspec

from swarm.jobs import Hardware, LoadingJob, SavingJob, TrainingJob
from swarm.jobs.memory import MemoryPlan
from swarm.wire import manifest
from swarm.wire.messages import Digest, RewardParts, Rewards
from swarm.world import Job, Setup

Figures = dict[str, int | float]


class TrainingSetup(Setup, frozen=True, kw_only=True):
    hardware: Hardware = Hardware()


class TrainingTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a run manifest that the learner needs."""

    objective: manifest.Objective
    optimiser: manifest.Optimiser
    schedule: manifest.Schedule
    sampling: manifest.Sampling
    adapter: manifest.Adapter = manifest.Adapter()
    thresholds: manifest.Thresholds = manifest.Thresholds()
    environments: list[manifest.EnvironmentReference] = []


class Sharding(msgspec.Struct, frozen=True, kw_only=True):
    """How the policy is distributed over ranks and memory: the trainer's settings of these names,
    which say what each does (`peers.trainer.settings`)."""

    replicas: int = 1
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    expert_parallel: bool = False
    mixed_precision: bool = False
    """Compute in bf16; reduce gradients and keep weights in fp32. The setting `dtype` decides."""
    activation_checkpointing: bool = False
    compile: bool = False
    cpu_offload: bool = False
    optimiser: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    pass_tokens: int = 0


class StartTraining(LoadingJob, frozen=True, kw_only=True):
    """Begin with a Hugging Face folder as policy 0, or with a published policy."""

    model: str
    terms: TrainingTerms
    seed: int
    sharding: Sharding = Sharding()
    dtype: str = "auto"
    """As `Hardware.dtype`; bfloat16 applies to the forward and backward passes."""
    attention: str = "fastest"
    """One of `peers.learning.attention.ATTENTIONS`."""
    teacher: str = ""
    """Folder of the teacher; empty: there is none, or it is the base."""
    policy: str = ""
    """Published folder of policy `step` to begin with; empty: policy 0 is `model`."""
    step: int = 0
    lineage: int = 0


class PlanTraining(LoadingJob, frozen=True, kw_only=True):
    """Say what a training would hold in memory, and load nothing."""

    start: StartTraining


class Resume(SavingJob, frozen=True, kw_only=True):
    """Continue from a saved training state."""

    start: StartTraining
    folder: str
    """The state that `BeginSave` wrote."""
    policies: dict[int, str]
    """Published Hugging Face folders by step."""


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    consumed: list[Digest]
    """Digests of consumed submissions that are recent enough to be offered again."""


class Follow(Job, frozen=True, kw_only=True):
    """Follow another version of the run from the next step on."""

    terms: TrainingTerms


class RollBack(SavingJob, frozen=True, kw_only=True):
    """Continue from an older state as a new lineage, which inherits the consumed list."""

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
    temperatures: list[float]
    """The temperature of each environment's rollouts, by index."""
    kept: list[bool]
    """[groups] False if the online filter excludes the group."""
    ungraded: list[int] = []
    """Groups without grades, whose rewards mean nothing, and those that continue states."""
    parts: RewardParts = RewardParts()
    """What the rewards are made of, from the verdict."""
    any_reward: bool = False
    """Whether groups whose rewards are all equal are trained on, too."""
    leaves_out_truncated: bool = False
    """Whether completions that the length limit cut off are not trained on."""
    seed: bytes = b""
    """The submission's, by which its tasks are drawn for `objective.teacher_prompt`."""


class StateValue(msgspec.Struct, array_like=True, frozen=True):
    """The estimated value of one state within a rollout (`swarm.rollouts.continuations`)."""

    row: int
    """Index of the rollout in its submission."""
    position: int
    """Model tokens of the rollout before the state."""
    value: float
    """Mean reward of its continuations."""


class TrainStep(TrainingJob, frozen=True, kw_only=True):
    step: int
    submissions: list[AcceptedSubmission]
    values: list[list[StateValue]] = msgspec.field(default_factory=list)
    """[submissions] Values of states of their rollouts; empty: of none."""


class ScoreAhead(TrainingJob, frozen=True, kw_only=True):
    """Read and score before the step, only to save time; what is unreadable is left to it."""

    submissions: list[AcceptedSubmission]


class Unreadable(msgspec.Struct, frozen=True, kw_only=True):
    """A submission that this machine cannot read."""

    index: int
    """Index among the job's submissions."""
    reason: str


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step. If a submission is unreadable, no training happened."""

    figures: Figures = {}
    """The learner's metrics."""
    outcomes: list[list[Literal["consumed", "zero-advantage"]]] = []
    """[submissions][groups]"""
    environments: list[Figures] = []
    """Figures of each environment, by index, as far as the batch has any."""
    unreadable: list[Unreadable] = []
    problems: list[str] = []
    """Why parts of the step were skipped: formulas of other packages that failed."""


class BeginSave(SavingJob, frozen=True, kw_only=True):
    """Copy what an exact resume needs, and begin to write it. An empty folder: not that part."""

    state: str = ""
    policy: str = ""
    """A plain Hugging Face folder."""


class FinishSave(SavingJob, frozen=True, kw_only=True):
    """Wait until all that the last `BeginSave` copied is durable. It may run beside `TrainStep`."""


class Export(SavingJob, frozen=True, kw_only=True):
    """Write the policy as a plain Hugging Face folder, durably."""

    folder: str
    base: bool = False
    """Write policy 0 instead, in a run that trains adapters."""


class Compare(SavingJob, frozen=True, kw_only=True):
    """Compare the policy held with a published one."""

    folder: str


class RecordTo(Job, frozen=True, kw_only=True):
    """Choose where `Record` writes."""

    patience_seconds: ClassVar[float] = 300.0
    """Covers a request to Weights & Biases over a slow network."""

    tensorboard: str
    """Folder; empty for no TensorBoard."""
    wandb: str
    """Project; empty for no Weights & Biases."""
    run: str
    terms: TrainingTerms
    """Recorded as the run's configuration."""
    peak_flops: float
    """Peak FLOP/s of one device; 0 looks it up by the device's name."""


class Record(Job, frozen=True, kw_only=True):
    """Write one step's metrics."""

    patience_seconds: ClassVar[float] = 300.0

    step: int
    figures: Figures
    environments: dict[str, dict[str, float]]
    """Figures of each environment, by its label."""


class TrainingService(Protocol):
    """Holds the learner. Folders and files are on a disk that every rank can access."""

    async def record_to(self, job: RecordTo) -> int:
        """The number of processes that train together. Raises `UserError` if a recorder fails."""

    async def plan(self, job: PlanTraining) -> MemoryPlan:
        """Say what the training holds in memory. Raises `UserError` for a broken config.json."""

    async def start(self, job: StartTraining) -> None:
        """Raises `UserError` for a model or a setting that cannot be trained."""

    async def resume(self, job: Resume) -> Resumed: ...

    async def follow(self, job: Follow) -> None: ...

    async def score(self, job: ScoreAhead) -> None: ...

    async def train(self, job: TrainStep) -> Trained: ...

    async def record(self, job: Record) -> None: ...

    async def begin_save(self, job: BeginSave) -> None: ...

    async def finish_save(self, job: FinishSave) -> None: ...

    async def export(self, job: Export) -> None: ...

    async def compare(self, job: Compare) -> bool:
        """Whether they are equal, bit for bit."""

    async def roll_back(self, job: RollBack) -> None: ...

    async def end(self) -> None:
        """Let the other ranks end, because the run is over."""
