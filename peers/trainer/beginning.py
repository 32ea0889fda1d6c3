"""Beginning: from the base policy, from a training state, or in another trainer's place."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

import trio

from peers.trainer.accepted import AcceptedSubmissions, TrainerLog
from peers.trainer.child import start_training, training_terms
from peers.trainer.orders import Orders
from peers.trainer.progress import Progress
from peers.trainer.publishing import Publisher
from peers.trainer.resuming import Lineages, Resumption
from peers.trainer.settings import TrainerSettings
from peers.trainer.training import Training
from swarm.errors import SwarmError, UserError
from swarm.jobs.training import PlanTraining, RecordTo, TrainingService
from swarm.node.run_node import RunNode
from swarm.shardcast.held import Held, is_right
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Checkpoint, CheckpointReference, StepOrder

ANNOUNCED_SECONDS = 30.0
"""Time in which the run's newest policy should be heard of."""

LOOKS_SECONDS = (5.0, 30.0, 120.0)
"""Pauses before this trainer looks, after each new version of the run, whether a standby had its
place meanwhile: that one may still publish a policy until it hears of the version."""


class Beginning:
    """Brings each new child to where the run is."""

    def __init__(
        self,
        settings: TrainerSettings,
        accepted: AcceptedSubmissions,
        orders: Orders,
        publisher: Publisher,
        training: Training,
    ) -> None:
        self._peer, self._settings = accepted.peer, settings
        self._accepted, self._orders = accepted, orders
        self._publisher, self._training = publisher, training
        self.place = Place(accepted.peer, accepted.progress, accepted.log)
        self.lineages = Lineages(settings, orders, accepted, publisher, training)
        self._resumption = Resumption(settings, accepted, publisher, training)
        self._begun = False
        """Whether this process has begun: a restarted child then continues without `--resume`."""
        self.ranks = 1
        """Processes that train together: the child, and ranks that this peer cannot restart."""

    async def begin(self, child: TrainingService) -> None:
        """Begin the run from the base policy, or continue from the newest durable state, or from
        the newest policy where another trainer has led the run or every state is lost."""
        states = self._publisher.states.all()
        newest = states[-1] if states else None
        if newest is not None:
            self._orders.continue_lineage(newest.lineage)
        is_outrun = newest is not None and await self.place.is_outrun(newest.lineage)
        manifest = self._training.follow(newest.step if newest else 0)
        if newest and not is_outrun and not self._peer.node.settings.resume and not self._begun:
            raise UserError(
                f"this home has a trained state of step {newest.step} already; "
                "start the trainer with --resume, or with another --home"
            )
        takes_over = is_outrun or (newest is None and await self.place.has_begun(self._begun))
        self._peer.status.doing = "loading"
        self._begun = True
        self._publisher.begin_life()
        job = RecordTo(
            tensorboard=self._settings.tensorboard,
            wandb=self._settings.wandb,
            run=self._peer.run.id,
            terms=training_terms(manifest),
            peak_flops=self._settings.peak_flops,
        )
        self.ranks = await child.record_to(job)
        if not self._orders.opened:
            await self._orders.restore_states()
        if takes_over:
            await self._plan(child, manifest)
            policy, lineage = await self.place.newest_policy(self._publisher.fetch)
            await self.lineages.take_over(child, manifest, policy, lineage)
            return
        if newest is not None:
            await self._plan(child, manifest)
            why = await self._resumption.resume(
                child, manifest, newest, load=not self._orders.opened
            )
            if why:
                await self.lineages.roll_back(child, newest, why)
            return
        if not self._orders.opened:
            await self._accepted.load()
        await self._plan(child, manifest)
        await child.start(start_training(self._settings, manifest))
        self._accepted.progress.advance(0)
        await self._publisher.publish_first(child, 0)

    async def _plan(self, child: TrainingService, manifest: RunManifest) -> None:
        """Say what the trainer will hold in memory; raises `UserError` if it does not fit."""
        found = await child.plan(PlanTraining(start=start_training(self._settings, manifest)))
        self._settings.take(found, self._peer.node.events, self._settings.save_steps)


@dataclass(eq=False)
class Place:
    """Knows whether another trainer has led the run while it had this one's place."""

    peer: RunNode
    progress: Progress
    log: TrainerLog

    async def has_begun(self, may_go_on: bool) -> bool:
        """Whether a policy was published, so that another would be signed for the same step.

        Raises `UserError` if it was, unless this process has gone on from it before, or an operator
        wants it to, by --resume or by a takeover."""
        run, published = self.peer.run, await self.log.policies()
        # The log of a trainer that is lost may be on no disk that a new peer can copy it from.
        if not published and not run.takeovers:
            return False
        has_taken_over = run.takeovers and run.manifest_envelope.sender == self.peer.peer_id
        if may_go_on or has_taken_over or self.peer.node.settings.resume:
            return True
        has = f"published policy {max(published)[1]} already" if published else "lost its trainer"
        raise UserError(
            f"run {run.id} has {has}, and this home has no training state; restore the home from "
            "a backup, let a standby take over with swarm trainer takeover, or start this one with "
            "--resume to go on from the run's newest policy with a new optimiser"
        )

    async def newest_policy(
        self, fetch: Callable[[CheckpointReference], Awaitable[None]]
    ) -> tuple[Held, int]:
        """The run's newest policy on this disk, or that peers announce, and the newest lineage.

        One on disk counts if a trainer announced or logged it; every byte is checked. Raises
        `UserError`."""
        peer = self.peer
        peer.status.doing = "fetching the newest policy"
        logged = await self.log.policies()
        newest = max(logged, default=(0, 0))

        def is_heard(_: object) -> bool:
            heard = peer.announced.newest()
            return heard is not None and (heard.lineage, heard.step) >= newest

        with trio.move_on_after(ANNOUNCED_SECONDS):  # an old announcement may come first
            await peer.checkpoint.wait_until(is_heard)
        if (announced := peer.announced.newest()) is not None:
            await fetch(announced)

        def is_published(held: Held) -> bool:
            lineage, step = held.key[:2]
            heard = peer.announced.reference_of(lineage, step)
            return held.digest in (logged.get((lineage, step)), heard.digest if heard else None)

        known = [each for each in peer.store.all() if each.complete and is_published(each)]
        for held in sorted(known, key=lambda each: each.key, reverse=True):
            if await self._is_sound(held):
                return held, self._newest_lineage(logged)
        raise UserError(
            f"no peer of run {peer.run.id} announces a policy any more, or has all of it, and none "
            "that is here is sound; copy the newest folder in checkpoints of any peer's home into "
            "checkpoints of this home, and start this trainer again"
        )

    async def _is_sound(self, held: Held) -> bool:
        """Whether a folder has just what its manifest says: it may be copied from anyone."""
        disk = self.peer.node.disk
        listed = {file.name.partition("/")[0] for file in held.manifest.files}
        found = {name for name in disk.list(held.folder) if not name.startswith(".")}
        return found <= listed and all(
            [await is_right(disk, held, index) for index in range(len(held.pieces))]
        )

    async def is_outrun(self, own: int) -> bool:
        """Whether another trainer has led the run to a later lineage than `own`, while it had this
        one's place. Nobody follows the earlier one any more."""
        manifest = self.peer.run.manifest
        if manifest.outer.rounds or not (manifest.standbys or self.peer.run.takeovers):
            return False
        return self._newest_lineage(await self.log.policies()) > own

    async def watch(self) -> NoReturn:
        """End this trainer if it did not notice that a standby took its place for a while: the
        owner's next version may have put it back before it heard of that."""
        while True:
            await self.peer.versions.changed.wait_change()
            for pause in LOOKS_SECONDS:
                await trio.sleep(pause)
                lineage = self.progress.lineage
                if await self.is_outrun(lineage) and lineage == self.progress.lineage:
                    raise SwarmError(
                        f"a standby has led run {self.peer.run.id} beyond this trainer's lineage "
                        f"{lineage}, and the owner has put the trainer back; start it again with "
                        "--resume, and it goes on above that"
                    )

    def _newest_lineage(self, logged: Iterable[tuple[int, int]]) -> int:
        """The newest lineage that this peer has heard of, or of the policies `logged`."""
        heard = [each.message for each in self.peer.newest()]
        lineages = [each.order()[0] for each in heard if isinstance(each, (Checkpoint, StepOrder))]
        return max([*lineages, *(lineage for lineage, _ in logged)], default=0)
