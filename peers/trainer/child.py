"""The trainer's child process, as its role calls it: one method per job of `service.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from peers.trainer.options import TrainerOptions
from peers.trainer.pool import Accepted
from peers.trainer.progress import FollowedVersions
from swarm.messages import RunManifest
from swarm.world import Child, Disk

SERVICE = "peers.trainer.service:open_service"
START_DEADLINE_SECONDS = 600.0
"""For the child to import torch and, under `torchrun`, to meet all other ranks."""
CALL_DEADLINE_SECONDS = 24 * 3600.0
"""For one call: a step of a large model on a slow machine."""
EVALUATE_PROMPTS = 512

LESSONS = ("objective", "optimiser", "schedule", "sampling")
"""Tables of a run manifest that the child learns by."""


class TrainerChild:
    """Calls the child. Folders are named by their path on the peer's disk."""

    def __init__(self, child: Child, disk: Disk, options: TrainerOptions) -> None:
        self._child = child
        self._disk = disk
        self._options = options

    async def record_to(self, run: str, manifest: RunManifest) -> int:
        """Open the records of metrics; how many ranks train together."""
        result = await self._call(
            "record_to",
            tensorboard=self._options.tensorboard,
            wandb=self._options.wandb,
            run=run,
            config=_plain(manifest.objective)
            | _plain(manifest.optimiser)
            | _plain(manifest.schedule),
            peak_flops=self._options.peak_flops,
        )
        ranks: int = result["ranks"]
        return ranks

    async def prepare_base(self) -> dict[str, Any]:
        """Make the demo's base policy; its accuracies."""
        return await self._call("prepare_base", folder=self._options.model, seed=self._options.seed)

    async def start(self, manifest: RunManifest) -> None:
        """Begin with the base policy."""
        await self._call("start", **self._arguments(manifest))

    async def resume(
        self, manifest: RunManifest, state: str, policies: Mapping[int, str]
    ) -> set[bytes]:
        """Continue from a training state; the submissions consumed that are young enough to be
        offered again. `policies`: folders of published policies, by step."""
        resumed = await self._call(
            "resume",
            **self._arguments(manifest),
            folder=self._local(state),
            policies=self._folders(policies),
        )
        return {bytes.fromhex(digest) for digest in resumed["consumed"]}

    async def roll_back(self, state: str, policies: Mapping[int, str], lineage: int) -> None:
        """Continue from an older training state as a new lineage."""
        await self._call(
            "roll_back",
            folder=self._local(state),
            policies=self._folders(policies),
            lineage=lineage,
        )

    async def follow(self, manifest: RunManifest) -> None:
        """Learn by this version of the run from the next step on."""
        await self._call("follow", **_lessons(manifest))

    async def train(
        self, step: int, batch: Sequence[Accepted], versions: FollowedVersions
    ) -> dict[str, Any]:
        """Take a rollout step (`TrainerService.train`)."""
        submissions = [
            {
                "digest": accepted.digest.hex(),
                "path": self._local(accepted.path),
                "policy": accepted.verdict.policy,
                "rewards": accepted.verdict.rewards,
                "kept": [label == "kept" for label in accepted.labels],
                "sampling": _plain(versions.manifest_of(accepted.verdict.step).sampling),
            }
            for accepted in batch
        ]
        return await self._call("train", step=step, submissions=submissions)

    async def begin_save(self, folder: str) -> None:
        """Begin to write the training state, the consumed submissions inside it."""
        await self._call("begin_save", folder=self._local(folder))

    async def finish_save(self) -> None:
        """Wait until that state is durable."""
        await self._call("finish_save")

    async def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._call("export", folder=self._local(folder))

    async def record(self, step: int, figures: Mapping[str, Any]) -> None:
        """Record a step's figures."""
        await self._call("record", step=step, figures=dict(figures))

    async def evaluate(self, folder: str) -> dict[str, Any]:
        """Accuracies of a published policy on held-out prompts."""
        return await self._call(
            "evaluate", folder=self._local(folder), prompts=EVALUATE_PROMPTS, split="held_out"
        )

    async def end(self) -> None:
        """Let the other ranks end."""
        await self._call("end")

    async def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return await self._child.call(method, arguments, deadline_seconds=CALL_DEADLINE_SECONDS)

    def _arguments(self, manifest: RunManifest) -> dict[str, Any]:
        return {
            **_lessons(manifest),
            "environments": manifest.environments,
            "seed": self._options.seed,
            "model": self._options.model,
            "sharding": self._options.sharding,
            "attention": self._options.attention,
        }

    def _folders(self, policies: Mapping[int, str]) -> dict[str, str]:
        return {str(step): self._local(folder) for step, folder in policies.items()}

    def _local(self, path: str) -> str:
        return str(self._disk.local_path(path))


def _lessons(manifest: RunManifest) -> dict[str, Any]:
    return {name: _plain(getattr(manifest, name)) for name in LESSONS}


def _plain(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
