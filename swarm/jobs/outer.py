"""The service of one of several trainers: inner steps, pseudo-gradients, and their merge.

Inner steps from the common *outer state* give a *contribution*, a compressed pseudo-gradient; all
of them merged give the next state. Every job is a function of the files that it names and writes
durably, so it may be repeated, and all who merge the same contributions hold the same bits."""

from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from swarm.jobs import Hardware, LoadingJob, SavingJob, TrainingJob
from swarm.jobs.memory import MemoryPlan
from swarm.jobs.training import Figures, Sharding
from swarm.wire.manifest import Compression, Optimiser
from swarm.wire.messages import Count, Digest
from swarm.world import Setup


class OuterSetup(Setup, frozen=True, kw_only=True):
    hardware: Hardware = Hardware()


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    """How one trainer takes its inner steps: the settings of these names, which say what each does
    (`peers.outer.settings`), and the run's optimiser."""

    data: list[str] = []
    weights: list[float] = []
    sequence_tokens: Annotated[int, Meta(ge=2)] = 1024
    batch_sequences: Annotated[int, Meta(ge=1)] = 32
    z_loss: Annotated[float, Meta(ge=0)] = 0.0
    validation_sequences: Annotated[int, Meta(ge=0)] = 0
    optimiser: Optimiser = Optimiser()


class StartReplica(LoadingJob, frozen=True, kw_only=True):
    """Load the model and the data; the first job of a service."""

    model: str
    """A Hugging Face folder."""
    trainer: str
    """Peer id. It, the round and the seed determine the data, so that no two trainers share any."""
    seed: int
    inner: Inner
    inner_steps: int
    """Inner steps of a round."""
    rounds: int
    """Rounds of the whole run, over which the learning rate's schedule extends."""
    compression: Compression
    shards: int = 1
    """Shards of a contribution."""
    trainers: tuple[str, ...] = ()
    """All trainers, among whom a round's data is divided; empty: this one has its own data."""
    sharding: Sharding = Sharding()
    dtype: str = "auto"
    attention: str = "fastest"
    memory_check: str = ""
    """What happens if the plan of the memory does not fit (the setting); empty: none is made."""
    tensorboard: str = ""
    """Folder of TensorBoard's files, project of Weights & Biases, for `run`'s curves; or empty."""
    wandb: str = ""
    run: str = ""
    folder: str = ""
    """Folder of its states; what a killed process left unfinished there is deleted. Empty: none."""


class ReplicaStarted(msgspec.Struct, frozen=True, kw_only=True):
    parameters: int
    contribution_bytes_max: Count
    """Size of the largest contribution that a trainer of this model can make."""
    shapes: dict[str, tuple[int, ...]] = {}
    """Of a pseudo-gradient's tensors, in order."""
    sequences: int = 0
    """Sequences of its data, without those held back."""
    data: str = ""
    """What its data hold: another text once a file has changed."""
    plan: MemoryPlan | None = None
    """What it holds in memory."""


class FirstState(SavingJob, frozen=True, kw_only=True):
    """Write the outer state before the first round: the model's weights, without momentum."""

    folder: str


class CheckState(SavingJob, frozen=True, kw_only=True):
    """Compute the digest of an outer state that another peer made, and check it."""

    folder: str


class OuterState(msgspec.Struct, frozen=True, kw_only=True):
    """An outer state on this disk: weights and momentum in fp32."""

    digest: Digest
    """BLAKE3-256 of weights and momentum, however they are divided into files."""
    problem: str = ""
    """One sentence about a state that cannot be used: unreadable, of other shapes, not finite."""


class TrainRound(TrainingJob, frozen=True, kw_only=True):
    """Take the inner steps of a round from an outer state, and write the contribution."""

    round: int
    """The round that the contribution is made for, from 1 on."""
    state: str
    """Folder of the outer state that the round begins from."""
    inner_before: str
    """Folder of this trainer's inner state after its previous round (inner optimiser, position in
    the data, error feedback); empty for its first round."""
    inner_after: str
    """Folder to write the inner state to."""
    contribution: str
    known: Figures = msgspec.field(default_factory=dict)
    """What the peer knows of the state, for the curves."""
    seed: int | None = None
    """Of the order of the data that the round assigns to a stranger; None: a trainer's order."""


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """A stranger's contribution to score."""

    trainer: str
    folder: str
    tokens: Annotated[int, Meta(ge=1)]
    seed: int
    """Of the order of the data that it was assigned."""


class ScoreRound(TrainingJob, frozen=True, kw_only=True):
    """Score the contributions of strangers to a round, all made from the same outer state."""

    state: str
    named: list[str]
    """Folders of contributions of trainers to the same round, at least one."""
    strangers: list[Offered]
    """In the order in which they were announced: of copies the first counts."""
    draw: bytes
    """From which the sequences that are measured follow."""


class Scored(msgspec.Struct, frozen=True):
    """What a contribution is worth: `swarm.wire.outer.Rated` explains the scores."""

    trainer: str
    gain: int
    own: int
    share: float
    """Its gain over that of the trainers' mean."""
    problem: str = ""
    """One sentence about a copy or an unreadable file."""


class RoundTrained(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Count
    """Tokens that the inner steps trained on: the contribution's weight in the merge."""
    figures: Figures = {}
    """The learner's metrics, `loss` among them."""


class InspectContribution(SavingJob, frozen=True, kw_only=True):
    """Check a contribution, or a shard of one or of a mean. May run beside `TrainRound`."""

    contribution: str
    """Its folder; with several shards, the shard's folder in it."""
    shard: int = 0
    shards: int = 1


class Contributed(msgspec.Struct, frozen=True, kw_only=True):
    """A contribution to merge."""

    trainer: str
    folder: str
    tokens: Annotated[int, Meta(ge=1)]
    weight: float | None = None
    """Of a stranger's contribution (`swarm.wire.outer.Rated`); None: a trainer's."""


class MergeShard(SavingJob, frozen=True, kw_only=True):
    """Write the mean of one shard of some contributions, weighed as by `MergeRound`, in the form of
    a contribution's shard. It is a function of the files alone, equal on all machines."""

    contributions: list[Contributed]
    """With the folder of each one's shard."""
    shard: int
    shards: int
    compression: Compression
    folder: str


class MergeRound(SavingJob, frozen=True, kw_only=True):
    """Write the outer state that follows from a state and contributions, whatever their order.

    The step is Nesterov momentum along the token-weighted mean of the pseudo-gradients, in which no
    claim weighs more than the median one, and none is longer than twice the median. What
    `InspectContribution` refuses is left out; the state stays if none remains. May run beside
    `TrainRound`."""

    state: str
    """Folder of the outer state before."""
    contributions: list[Contributed]
    momentum: float
    learning_rate: float
    folder: str
    """Folder to write the outer state after to."""
    strangers_share: float = 0.0
    """Largest part of the mean that strangers have together."""
    shards: list[str] = msgspec.field(default_factory=list)
    """Instead of contributions: folders of the means of all shards, in order."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    trainer: str
    problem: str


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    digest: Digest
    """As `OuterState.digest`; of a shard, BLAKE3-256 of what its file decompresses to."""
    left_out: list[LeftOut] = []
    shortened: list[str] = []
    """Trainers whose contributions were longer than twice the median."""
    figures: Figures = {}


class MeasureState(TrainingJob, frozen=True, kw_only=True):
    """Measure an outer state on the sequences held back. `TrainRound` starts from its own state."""

    state: str


class ExportState(SavingJob, frozen=True, kw_only=True):
    """Write the weights of an outer state as a plain Hugging Face folder."""

    state: str
    folder: str


class OuterService(Protocol):
    """Trains one of several replicas. A folder to write to that exists is replaced."""

    async def start(self, job: StartReplica) -> ReplicaStarted:
        """Raises `UserError` for a model, data or a setting that cannot be trained with."""

    async def first_state(self, job: FirstState) -> OuterState: ...

    async def check_state(self, job: CheckState) -> OuterState: ...

    async def train(self, job: TrainRound) -> RoundTrained:
        """Raises `UserError` when the data has too few tokens for a round."""

    async def inspect(self, job: InspectContribution) -> OuterState:
        """What is wrong: unreadable, other shapes, NaN, too large; and BLAKE3-256 of what the file
        decompresses to. It depends on the contribution's bytes and the model's shapes alone."""

    async def merge(self, job: MergeRound) -> Merged: ...

    async def merge_shard(self, job: MergeShard) -> Merged: ...
    async def measure(self, job: MeasureState) -> float | None:
        """Nats per predicted token; None if no sequence is held back."""

    async def score(self, job: ScoreRound) -> list[Scored]:
        """In the order of `job.strangers`; empty if no contribution of a trainer can be read."""

    async def export_state(self, job: ExportState) -> None: ...

    async def end(self) -> None:
        """End the other ranks, if there are any. Jobs that compute from files alone may follow."""


class DrawModel(SavingJob, frozen=True, kw_only=True):
    """Write a model with random weights, before `StartReplica`."""

    model: str
    """A folder with config.json and tokenizer."""
    folder: str
    seed: int


class AloneService(Protocol):
    """The part of the service that `swarm train` uses besides `OuterService`."""

    async def draw_model(self, job: DrawModel) -> None:
        """Raises `UserError` for a configuration that is not supported."""
