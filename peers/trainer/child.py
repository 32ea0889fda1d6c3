"""The jobs of the trainer's child process that are filled in from several places."""

from collections.abc import Sequence

import msgspec

from peers.trainer.pool import UNCOUNTED, Accepted
from peers.trainer.progress import FollowedVersions
from peers.trainer.settings import TrainerSettings
from swarm.jobs.training import AcceptedSubmission, StartTraining, TrainingTerms
from swarm.wire.manifest import RunManifest
from swarm.world import Disk

SERVICE = "peers.trainer.service:open_service"
START_DEADLINE_SECONDS = 600.0
"""Time for the child to import torch and, under `torchrun`, to meet all other ranks."""


def start_training(
    settings: TrainerSettings,
    manifest: RunManifest,
    policy: str = "",
    step: int = 0,
    lineage: int = 0,
) -> StartTraining:
    """Begin with the base, or with the published folder `policy`."""
    return settings.filled(
        StartTraining,
        terms=training_terms(manifest),
        sharding=settings.sharding,
        policy=policy,
        step=step,
        lineage=lineage,
    )


def training_terms(manifest: RunManifest) -> TrainingTerms:
    return msgspec.convert(manifest, TrainingTerms, from_attributes=True)


def accepted_submissions(
    batch: Sequence[Accepted], versions: FollowedVersions, disk: Disk
) -> list[AcceptedSubmission]:
    return [
        AcceptedSubmission(
            digest=accepted.digest,
            path=str(disk.local_path(accepted.path)),
            rollouts_digest=accepted.verdict.rollouts_digest,
            policy=accepted.verdict.policy,
            rewards=accepted.verdict.rewards,
            temperatures=manifest.sampling.temperatures(manifest.environments),
            kept=[label == "kept" for label in accepted.labels],
            parts=accepted.verdict.parts,
            leaves_out_truncated=manifest.objective.truncated == "leave_out",
            any_reward=not manifest.objective.needs_spread,
            seed=accepted.verdict.seed,
            ungraded=[n for n, each in enumerate(accepted.labels) if each in UNCOUNTED],
        )
        for accepted in batch
        for manifest in [versions.manifest_of(accepted.verdict.step)]
    ]
