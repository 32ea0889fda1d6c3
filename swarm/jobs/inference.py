"""The service that generates submissions."""

from __future__ import annotations

from typing import ClassVar, Protocol

import msgspec

from swarm.jobs import Hardware, Load, SubmissionOrder
from swarm.messages import Digest, EnvironmentReference
from swarm.world import Job, Setup


class InferenceSetup(Setup, frozen=True, kw_only=True):
    engine: str = "native"
    hardware: Hardware = Hardware()
    alter_weights: float = 0.0
    """Size of the noise added to all weights after loading, relative to each tensor's norm. The
    demo's cheater uses it."""
    environments: list[EnvironmentReference]


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float


class Probe(Job, frozen=True, kw_only=True):
    """Render an environment's 64 probe tasks with the loaded policy's tokenizer."""

    patience_seconds: ClassVar[float] = 600.0
    """Covers an environment that fetches or builds its data when it draws its first task."""

    environment: EnvironmentReference


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    digest: Digest
    """BLAKE3-256 of the rendered token ids; it must equal `EnvironmentReference.probe_hash`."""


class Generate(Job, frozen=True, kw_only=True):
    """Generate one submission with its proofs and write it durably to `path`."""

    patience_seconds: ClassVar[float] = 600.0
    """Every step of an engine reports progress; the first one may compile kernels. An engine that
    hangs is killed after this time and started again, and the finished rollouts are kept."""

    order: SubmissionOrder
    path: str


class Generated(msgspec.Struct, frozen=True, kw_only=True):
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
