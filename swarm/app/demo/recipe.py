"""The run manifest of the demo, and the modules that its fork server imports."""

from __future__ import annotations

from msgspec.structs import replace

from peers.demo import ENVIRONMENT, MODEL, OBJECTIVE, OPTIMISER, SAMPLING, SCHEDULE
from swarm.messages import RunManifest, TrustedKey
from swarm.run.toml import RunHashes

PRELOAD = ("torch", "transformers", "transformers.models.qwen2.modeling_qwen2")
"""Modules that the fork server imports. None may import pyarrow, whose allocator starts a thread: a
fork server must have only one."""


def demo_manifest(
    *, name: str, steps: int, hashes: RunHashes, trainer: str, validator: str
) -> RunManifest:
    """Make the run manifest of the demo. `hashes`: see `probe_hashes`."""
    (probe,) = hashes.probes
    return RunManifest(
        name=name,
        version=1,
        model=MODEL,
        tokenizer_hash=hashes.tokenizer,
        environments=[replace(ENVIRONMENT, probe_hash=probe)],
        sampling=SAMPLING,
        schedule=replace(SCHEDULE, steps=steps),
        objective=OBJECTIVE,
        optimiser=OPTIMISER,
        trainers=[TrustedKey(peer=trainer)],
        validators=[TrustedKey(peer=validator)],
        checkpoints_kept=5,
    )
