"""The work contract: typed requests and replies of every service that runs in a child process.

One `Protocol` per service. A role calls a client of it (`InferenceClient`), the child's service
implements it, and so does the simulator's cost model: a changed field is a type error in all three.
Paths are absolute and name files on this machine.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import msgspec

from swarm.messages import CheckpointReference, Digest, EnvironmentReference, Sampling
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
    environment: EnvironmentReference
    sampling: Sampling

    def seed(self) -> bytes:
        """Seed of every prompt and of all noise in the submission."""
        return submission_seed(self.run, self.nonce, self.worker, self.number)

    def rows(self) -> int:
        """Completions in the submission."""
        return self.groups * self.sampling.group_size


# --- inference -------------------------------------------------------------------------------


class Load(Job, frozen=True, kw_only=True):
    """Make a Hugging Face folder the policy in use."""

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
