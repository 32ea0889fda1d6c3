"""Publishing: exports weights, hashes them into a checkpoint, logs it and announces it."""

from __future__ import annotations

from collections.abc import Sequence

from peers.trainer.child import TrainerChild
from peers.trainer.progress import Progress
from swarm.envelope import STATE_LIFETIME_SECONDS
from swarm.ledger.entries import CheckpointPublished
from swarm.messages import Checkpoint, CheckpointReference
from swarm.node.run_node import RunNode
from swarm.node.trusted import TrustedPart
from swarm.shardcast.held import Held


class Publisher:
    """Publishes policies, each once per lineage and step."""

    def __init__(
        self, peer: RunNode, trusted: TrustedPart, progress: Progress, mirrors: Sequence[str]
    ) -> None:
        self._peer = peer
        self._trusted = trusted
        self._progress = progress
        self._mirrors = mirrors
        self.published: dict[int, CheckpointReference] = {}
        """Policies of this lineage that are on this disk."""
        self._logged: set[int] = set()
        """Policies logged as published."""
        self._exported = ""
        """Folder of the newest policy that this process has exported."""

    def begin_life(self) -> None:
        """Take over the policies that earlier child processes have published."""
        self._exported = ""
        self.forget_lineage()
        for lineage, step in self._peer.store.complete():
            held = self._peer.store.held((lineage, step))
            if held is not None and lineage == self._progress.lineage:
                self.published[step] = _reference(held)

    def recall(self, entry: CheckpointPublished) -> None:
        """Note a policy that the log lists as published."""
        if entry.lineage == self._progress.lineage:
            self._logged.add(entry.step)

    def forget_lineage(self) -> None:
        """Begin a lineage in which no policy is published yet."""
        self.published.clear()
        self._logged.clear()

    def folders(self) -> dict[int, str]:
        """Folders of the policies of this lineage that are on this disk, by step."""
        return {
            step: held.folder
            for step in self.published
            if (held := self._peer.store.held((self._progress.lineage, step))) is not None
        }

    def newest_folder(self) -> str:
        """Folder of the newest policy."""
        held = self._peer.store.held((self._progress.lineage, self._progress.policy))
        assert held is not None
        return held.folder

    async def export(self, child: TrainerChild, step: int) -> str:
        """Write policy `step` unless it is written already; return its folder."""
        folder = f"trainer/export-{self._progress.lineage}-{step}"
        if self._exported != folder:
            await self._peer.node.disk.remove(folder)  # from before a restart
            await child.export(folder)
            self._exported = folder
        return folder

    async def publish(self, child: TrainerChild, step: int, *, reward: float) -> None:
        """Make policy `step` a checkpoint, log it, announce it.

        `reward`: mean reward of the batch that produced it.
        """
        lineage = self._progress.lineage
        held = self._peer.store.held((lineage, step))
        if held is None or not held.complete:
            folder = await self.export(child, step)
            held = await self._peer.policies.deltas.publish(
                folder, lineage, step, mirrors=self._mirrors
            )
        if step not in self._logged:
            await self._trusted.append(
                [CheckpointPublished(lineage=lineage, step=step, manifest=held.digest)]
            )
            self._logged.add(step)
        self.published[step] = _reference(held)
        self._progress.reach(step)
        self._peer.status.policy = step
        checkpoint = Checkpoint(
            reference=self.published[step],
            total_bytes=held.manifest.total_bytes,
            reward=reward,
        )
        await self._peer.announce(checkpoint, STATE_LIFETIME_SECONDS)
        self._peer.node.events.emit(
            "trainer.checkpoint_published",
            step=step,
            lineage=lineage,
            manifest=held.digest,
            bytes=held.manifest.total_bytes,
        )
        self._progress.changed.touch()


def _reference(held: Held) -> CheckpointReference:
    lineage, step = held.key
    return CheckpointReference(
        lineage=lineage, step=step, digest=held.digest, size_bytes=held.manifest_bytes
    )
