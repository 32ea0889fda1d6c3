"""Beginning: from the base policy, from a training state, or in another trainer's place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import msgspec
import trio

from peers.trainer.accepted import AcceptedSubmissions, TrainerLog
from peers.trainer.child import TrainerChild
from peers.trainer.orders import Orders
from peers.trainer.progress import Progress
from peers.trainer.publishing import Publisher
from peers.trainer.resuming import Lineages, Resumption
from peers.trainer.saving import State
from peers.trainer.settings import TrainerSettings
from peers.trainer.training import Training
from swarm.errors import SwarmError, UserError
from swarm.jobs.memory import MemoryPlan, fullest, shown
from swarm.node.run_node import RunNode
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Checkpoint, StepOrder

LOOKS_SECONDS = (5.0, 30.0, 120.0)
"""Pauses before this trainer looks, after each new version of the run, whether a standby had its
place meanwhile: that one may still publish a policy until it hears of the version."""


class Beginning:
    """Brings each new child to where the run is."""

    def __init__(
        self,
        peer: RunNode,
        settings: TrainerSettings,
        progress: Progress,
        accepted: AcceptedSubmissions,
        orders: Orders,
        publisher: Publisher,
        training: Training,
    ) -> None:
        self._peer, self._settings, self._progress = peer, settings, progress
        self._accepted, self._orders = accepted, orders
        self._publisher, self._training = publisher, training
        self.place = Place(peer, progress, accepted.log)
        self.lineages = Lineages(peer, settings, progress, orders, accepted, publisher, training)
        self._resumption = Resumption(peer, progress, accepted.store, accepted, publisher, training)
        self._begun = False
        """Whether this process began or resumed the run: a restarted child then continues from the
        states on this disk without `--resume`."""
        self.ranks = 1
        """Processes that train together: the child, and ranks that this peer cannot restart."""

    async def begin(self, child: TrainerChild) -> None:
        """Begin the run from the base policy, or continue from the newest durable state."""
        saved = self._publisher.states
        inherited, states, restored = saved.inherited(), saved.all(), saved.restored()
        newest = inherited or restored or (states[-1] if states else None)
        if newest is not None:
            self._orders.continue_lineage(newest.lineage)
        if (
            states
            and inherited is None
            and not self._begun
            and await self.place.is_outrun(states[-1])
        ):
            inherited = states[-1]  # its own, and what another trainer did since is lost
        manifest = self._training.steps.follow(newest.step if newest else 0)
        if states and not inherited and not self._peer.node.settings.resume and not self._begun:
            raise UserError(
                f"this home has a trained state of step {states[-1].step} already; "
                "start the trainer with --resume, or with another --home"
            )
        if newest is None:
            await self.place.check_first()
        self._training.steps.merging.check(manifest)
        self._peer.status.doing = "loading"
        self._begun = True
        self._publisher.begin_life()
        self.ranks = await child.record_to(self._peer.run.id, manifest)
        if not self._orders.opened:
            await self._orders.restore_states()
        if inherited is not None or restored is not None:
            await self._plan(child, manifest)
        if restored is not None:
            await child.start(manifest, restored.folder, restored.step)
            inherited = await saved.from_policy(child, restored)
        if inherited is not None:
            newest_lineage = max(await self.place.newest_lineages(), default=0)
            await self.lineages.inherit(child, manifest, inherited, newest_lineage)
            return
        await saved.drop_inherited()
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
        if self._settings.prepare_base:
            self._peer.status.doing = "preparing the base policy"
            measured = await child.prepare_base()
            self._peer.node.events.emit(
                "trainer.evaluated", moment="before", **msgspec.to_builtins(measured)
            )
        await self._plan(child, manifest)
        await child.start(manifest)
        self._progress.advance(0)
        await self._publisher.publish_first(child, 0)

    async def _plan(self, child: TrainerChild, manifest: RunManifest) -> None:
        """Say what the trainer will hold in memory; raises `UserError` if it does not fit."""
        found = await child.plan(manifest)
        self._peer.node.events.emit(
            "trainer.planned",
            parameters=found.parameters,
            ranks=found.ranks,
            pass_tokens=found.tokens,
            device_bytes=found.device_bytes,
            device_limit=found.device_limit,
            host_bytes=found.host_bytes,
            host_limit=found.host_limit,
            device_parts=_words(found, "device"),
            host_parts=_words(found, "host"),
            save_steps=self._settings.save_steps,
            problem=found.problem,
        )
        if found.problem and self._settings.memory_check == "refuse":
            raise UserError(found.problem)


@dataclass(eq=False)
class Place:
    """Knows whether another trainer has led the run while it had this one's place."""

    peer: RunNode
    progress: Progress
    log: TrainerLog

    async def check_first(self) -> None:
        """Refuse to begin a run that has begun: policies would be signed a second time.

        Raises `UserError`.
        """
        newest = await self.log.newest_policy()
        # The log of a trainer that is lost may be on no disk that a new peer can copy it from.
        if newest is not None or self.peer.run.takeovers:
            has = f"published policy {newest[1]} already" if newest else "lost its trainer"
            raise UserError(
                f"run {self.peer.run.id} has {has}, and this home has no training state; restore "
                "the home from a backup, let a standby take over with swarm trainer takeover, or "
                "begin with the run's newest policy by swarm trainer restore"
            )

    async def is_outrun(self, own: State) -> bool:
        """Whether another trainer has led the run to a later lineage than that of `own`, while it
        had this one's place. Nobody follows the earlier one any more."""
        manifest = self.peer.run.manifest
        if manifest.outer.rounds or not (manifest.standbys or self.peer.run.takeovers):
            return False
        return max(await self.newest_lineages(), default=0) > own.lineage

    async def watch(self) -> NoReturn:
        """End this trainer if it did not notice that a standby took its place for a while: the
        owner's next version may have put it back before it heard of that."""
        while True:
            await self.peer.versions.changed.wait_change()
            for pause in LOOKS_SECONDS:
                await trio.sleep(pause)
                lineage = self.progress.lineage
                if await self.is_outrun(State(lineage, 0)) and lineage == self.progress.lineage:
                    raise SwarmError(
                        f"a standby has led run {self.peer.run.id} beyond this trainer's lineage "
                        f"{lineage}, and the owner has put the trainer back; start it again with "
                        "--resume, and it goes on above that"
                    )

    async def newest_lineages(self) -> list[int]:
        """The newest lineages that this peer has heard of or reads in the trusted peers' logs."""
        logged = await self.log.newest_policy()
        heard = [each.message for each in self.peer.newest()]
        lineages = [each.order()[0] for each in heard if isinstance(each, (Checkpoint, StepOrder))]
        return lineages if logged is None else [logged[0], *lineages]


def _words(found: MemoryPlan, memory: str) -> list[str]:
    """The parts of a rank's memory in its fullest phase, each with its size."""
    return [f"{part.name} {shown(part.bytes)}" for part in fullest(found.parts, memory)]
