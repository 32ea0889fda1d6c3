"""Publishing: exports weights, hashes them into a checkpoint, logs it and announces it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from peers.trainer.accepted import TrainerLog
from peers.trainer.progress import STEPS_REMEMBERED, Progress
from peers.trainer.saving import SavedStates, State
from swarm.errors import SwarmError
from swarm.jobs.training import BeginSave, Export, TrainingService
from swarm.ledger.entries import CheckpointPublished, Consumed, TrainingFigures
from swarm.node.run_node import RunNode
from swarm.wire.envelope import STATE_LIFETIME_SECONDS
from swarm.wire.messages import Checkpoint, CheckpointReference
from swarm.world.tasks import alongside

HOLDERS_SECONDS = 60.0
"""Time for a peer to be found that holds a policy which was deleted here."""


class NotAsLogged(SwarmError):
    """A policy that was published cannot be published again: its manifest would be another."""


@dataclass(eq=False)
class Publisher:
    """Publishes policies, each once per lineage and step."""

    peer: RunNode
    log: TrainerLog
    progress: Progress
    states: SavedStates
    mirrors: Sequence[str]
    _logged: dict[int, bytes] = field(default_factory=dict)
    """Policies logged as published, and the digests of their manifests."""
    _exported: str = ""
    """Folder of the newest policy that this process has exported."""

    def begin_life(self) -> None:
        """Take over the policies that earlier child processes have published."""
        self._exported = ""
        self.forget_lineage()
        self._take_over()

    def _take_over(self) -> None:
        for lineage, step in self.peer.store.complete():
            held = self.peer.store.held((lineage, step))
            if held is not None and lineage == self.progress.lineage:
                self.progress.published[step] = held.reference

    def recall(self, entry: CheckpointPublished) -> None:
        """Note a policy that the log lists as published."""
        if entry.lineage == self.progress.lineage:
            self._logged[entry.step] = entry.manifest

    @property
    def newest(self) -> int:
        """The newest policy of this lineage that is on this disk, or logged as published."""
        return max({*self.progress.published, *self._logged})

    def is_logged(self, step: int) -> bool:
        """Whether the log lists a policy of this lineage as published."""
        return step in self._logged

    def forget_lineage(self) -> None:
        """Begin a lineage in which no policy is published yet."""
        self.progress.published.clear()
        self._logged.clear()

    def _forget_before(self, step: int) -> None:
        """Forget old policies. A trainer that repeats steps publishes the oldest ones first."""
        for known in (self.progress.published, self._logged):
            for old in [each for each in known if each < step]:
                del known[old]

    async def fetch_back(self, oldest: int, used: CheckpointReference | None) -> None:
        """Fetch back deleted policies from `oldest` on, and the one in use, if a peer has them."""
        store, lineage = self.peer.store, self.progress.lineage
        known = self.peer.announced.references(lineage)[-store.keep :]
        kept = [each for each in known if each.step >= oldest]
        named = {each.step: each for each in (*kept, *([used] if used else ()))}
        self.peer.status.doing = "fetching policies that were deleted"
        async with trio.open_nursery() as nursery:
            for reference in named.values():
                if reference.step not in self.progress.published:
                    nursery.start_soon(self.fetch, reference)
        self._take_over()

    async def fetch(self, reference: CheckpointReference) -> None:
        """Fetch a policy, or give up if no peer is found that has any of it."""

        async def is_hopeless() -> None:
            await trio.sleep(HOLDERS_SECONDS)
            if self.peer.store.held((reference.lineage, reference.step)) is not None:
                await trio.sleep_forever()

        async with alongside(until=is_hopeless):
            with suppress(SwarmError):
                await self.peer.policies.get(reference)

    def folders(self) -> dict[int, str]:
        """Local paths of the policies of this lineage that are on this disk, by step."""
        return {
            step: self.local(held.folder)
            for step in self.progress.published
            if (held := self.peer.store.held((self.progress.lineage, step))) is not None
        }

    def local(self, folder: str) -> str:
        """The path of a folder on this machine, as jobs name it."""
        return str(self.peer.node.disk.local_path(folder))

    def export_folder(self, step: int) -> str:
        """The folder that policy `step` is written to."""
        return f"trainer/export-{self.progress.lineage}-{step}"

    async def clear_export(self, step: int) -> str:
        """Delete a folder of policy `step` that an earlier process has left; return its path."""
        folder = self.export_folder(step)
        await self.peer.node.disk.remove(folder)
        return folder

    async def begin_save(self, child: TrainingService, step: int, state: State | None) -> None:
        """Begin to write policy `step`, which the child holds, and this state, if any."""
        policy = self.local(await self.clear_export(step))
        job = BeginSave(state=self.local(state.folder) if state else "", policy=policy)
        await child.begin_save(job)

    async def finish_save(self, child: TrainingService, step: int, state: State | None) -> None:
        """Wait until they are durable. Announce nothing before."""
        await self.states.finish(child, state)
        self._exported = self.export_folder(step)

    async def publish_first(self, child: TrainingService, step: int) -> None:
        """Write the state of policy `step`, which begins a lineage, and publish it."""
        state = State(self.progress.lineage, step)
        await self.begin_save(child, step, state)
        await self.finish_save(child, step, state)
        await self.publish(child, step, reward=0.0)

    async def _export(self, child: TrainingService, step: int) -> str:
        """Write policy `step`, which the child holds, unless it is written already."""
        folder = self.export_folder(step)
        if self._exported != folder:
            await child.export(Export(folder=self.local(await self.clear_export(step))))
            self._exported = folder
        return folder

    async def _base_of(self, child: TrainingService, step: int) -> CheckpointReference | None:
        """The model that policy `step` adapts, published again if deleted; None: it is whole."""
        if not step or not self.peer.run.manifest.adapter.rank:
            return None
        store = self.peer.store
        bases = [held.manifest.base for held in store.all() if held.manifest.base is not None]
        lineage = self.progress.lineage
        if bases and store.held((lineage, 0)) is None:  # it began with an adapter
            lineage = bases[-1].lineage
        base = store.held((lineage, 0))
        if base is None or not base.complete:
            folder = await self.clear_export(0)
            await child.export(Export(folder=self.local(folder), base=True))
            base = await self.peer.policies.deltas.publish(folder, lineage, 0, mirrors=self.mirrors)
        return base.reference

    async def publish(
        self,
        child: TrainingService,
        step: int,
        *,
        reward: float,
        figures: TrainingFigures | None = None,
        consumed: Sequence[Consumed] = (),
    ) -> None:
        """Publish policy `step`, with its log; raises `NotAsLogged` if it was otherwise before."""
        if consumed:
            await self.log.consumed(consumed)
        lineage = self.progress.lineage
        held = self.peer.store.held((lineage, step))
        if held is None or not held.complete:
            folder = await self._export(child, step)
            adapts = await self._base_of(child, step)
            held = await self.peer.policies.deltas.publish(
                folder, lineage, step, mirrors=self.mirrors, adapts=adapts
            )
        if self._logged.get(step, held.digest) != held.digest:
            await self.peer.store.withdraw(held.key)
            raise NotAsLogged(
                f"policy {step} is on no disk that this trainer can reach, and its files, or the "
                "deltas that lead to it, would not be those that were published"
            )
        if step not in self._logged:
            entry = CheckpointPublished(
                lineage=lineage, step=step, manifest=held.digest, figures=figures
            )
            await self.log.trusted.append([entry])
            self._logged[step] = held.digest
        self.progress.published[step] = held.reference
        self._forget_before(step - STEPS_REMEMBERED)
        self.progress.policy = self.peer.status.policy = step
        base = self.peer.store.base_of(held)
        checkpoint = Checkpoint(
            reference=self.progress.published[step],
            total_bytes=held.manifest.total_bytes,
            reward=reward,
            base_bytes=base.manifest.total_bytes if base is not None else 0,
        )
        await self.peer.announce(checkpoint, STATE_LIFETIME_SECONDS)
        self.peer.node.events.emit(
            "trainer.checkpoint_published",
            step=step,
            lineage=lineage,
            manifest=held.digest,
            bytes=held.manifest.total_bytes,
        )
        self.progress.changed.touch()
