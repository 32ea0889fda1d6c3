"""The service that generates submissions."""

from typing import ClassVar, Protocol

import msgspec

from swarm.errors import UserError
from swarm.jobs import Hardware, Load, SubmissionOrder
from swarm.wire.manifest import EnvironmentReference
from swarm.wire.messages import CheckpointReference, Digest
from swarm.world import Job, Setup


class TurnFailed(UserError):
    """An environment that runs here failed over a turn. Its submission ends, and is made again with
    the same tokens; others go on."""


class InferenceSetup(Setup, frozen=True, kw_only=True):
    engine: str = "native"
    hardware: Hardware = Hardware()
    alter_weights: float = 0.0
    round_weights: str = "none"
    """Both as in `peers.inference.settings`."""
    environments: list[EnvironmentReference]
    allowed: tuple[str, ...] = ()
    """Environments that are built whatever their options, beside those of the process."""
    tokens_max: int = 1024
    """Most tokens of a completion (`Sampling.max_new_tokens`), for the memory that one needs."""


class Surveyed(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    engine_version: str
    torch_version: str
    device: str
    device_title: str
    """The device's model."""
    driver: str = ""
    """Versions of driver and CUDA; empty on a CPU."""
    dtype: str
    threads: int
    free_bytes: int
    """Memory of the device that is free now."""
    unused_gpu: str = ""
    """Why a GPU of this machine is not used; empty where that is not the case."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    weights_bytes: int = 0
    """Memory of the weights."""
    row_bytes: int = 0
    """Memory of the cache of one completion of `row_tokens` tokens."""
    row_tokens: int = 0
    slots: int = 0
    """Completions generated at once, at most; 0: unknown."""
    free_bytes: int = 0
    """Memory of the device that was free before the policy was loaded."""


class Probe(Job, frozen=True, kw_only=True):
    """Render an environment's 64 probe tasks with the loaded policy's tokenizer."""

    patience_seconds: ClassVar[float] = 600.0
    """Covers an environment that fetches or builds its data when it draws its first task."""

    environment: EnvironmentReference


class SignedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of a group, from an environment peer."""

    group: int
    tokens: list[int]
    last: bool
    """Whether the model's first segment ends the episode."""
    signed: bytes
    """The signed turn (`swarm.wire.turns.Turn`)."""


class Generate(Job, frozen=True, kw_only=True):
    """Generate one submission with its proofs, durably. A later one's completions begin as those of
    the earlier one finish, or once all have; proofs and files are made beside."""

    patience_seconds: ClassVar[float] = 600.0
    """Every step of an engine reports progress; the first one may compile kernels. An engine that
    hangs is killed after this time and started again."""

    order: SubmissionOrder
    path: str
    prompts: list[SignedPrompt] = msgspec.field(default_factory=list)
    """Those of all groups whose environment is served."""


class AskedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that waits for the environment's turn."""

    seed: Digest
    """The submission's."""
    row: int
    segments: list[list[int]]
    """Token ids of all segments so far."""


class AskedTurns(msgspec.Struct, frozen=True, kw_only=True):
    """What the batch waits for."""

    turns: list[AskedTurn] = []
    stalled: int = 0
    """Submissions in the batch, if all of their episodes now wait for served turns; else 0."""


class GiveTurn(Job, frozen=True, kw_only=True):
    """Go on with an episode that waits for the environment's turn."""

    seed: Digest
    row: int
    tokens: list[int] = msgspec.field(default_factory=list)
    """Empty: the episode is over."""
    signed: bytes = b""
    unwanted: str = ""
    """Why nobody wants the submission any more, which is then given up; empty otherwise."""


class Swap(Job, frozen=True, kw_only=True):
    """Go on with another policy, from the next token on."""

    patience_seconds: ClassVar[float] = 600.0

    load: Load


class Swapping(msgspec.Struct, frozen=True, kw_only=True):
    """The engine has taken note; it swaps if the submission may."""

    reading: CheckpointReference | None = None
    """The policy offered before that it is loading now: its folder is still needed."""


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    digest: Digest
    """BLAKE3-256 of the file."""
    size_bytes: int
    groups: int
    tokens: int
    slots_left: int = 0
    """Completions that the engine will generate at once, if it lowered their number because memory
    was short; 0: it did not."""
    seconds_generate: float
    """Time of the engine's steps. A step that completions of several submissions share counts in
    proportion to their number."""
    seconds_proofs: float
    policy: CheckpointReference
    """The policy that is loaded now."""
    policies: list[int] = []
    """Numbers of the policies that its tokens were sampled from, ascending."""
    seconds_load: float = 0.0
    """Time that loading it took."""


class InferenceService(Protocol):
    """Generates submissions with one policy at a time, several at once."""

    async def survey(self) -> Surveyed:
        """Report the machine and the engine."""

    async def load(self, job: Load) -> Loaded:
        """Raises `UserError` for a folder that holds no supported model, `ValueError` if a
        submission was asked for since the call."""

    async def probe(self, job: Probe) -> Digest:
        """BLAKE3-256 of the token ids. Raises `UserError` for an environment that is not here."""

    async def generate(self, job: Generate) -> Generated:
        """Raises `ValueError` if a policy not of the order (with `Sampling.swaps_max`, its lineage)
        is loaded or an episode exceeds the context, `UserError` without its environment."""

    async def turns(self) -> AskedTurns:
        """Episodes that have come to wait for a served turn; after a minute without any, none."""

    async def give(self, job: GiveTurn) -> None:
        """Answers while submissions are generated; a submission that is over is ignored."""

    async def swap(self, job: Swap) -> Swapping:
        """Load a later policy before the next token, or with the next submission if the batch has
        none; a newer offer replaces it. Without effect after `Sampling.swaps_max` swaps of one in
        the batch, for an engine that cannot, and for an earlier policy."""

    async def usage(self) -> float:
        """Seconds in which the engine generated since its start. Answers while it generates."""
