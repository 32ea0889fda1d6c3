"""The trainer role: open steps, collect accepted submissions, train, publish.

Four tasks run concurrently. The `Collector` turns the validators' verdicts into a durable
pool of accepted submissions. `Orders` keeps the right step open. The main loop takes batches from
the pool and has a child process step the optimiser. Beside the next step's training, the new policy
is written and published.

A batch is recorded before anything of it leaves this disk, and a policy is durable before it is
announced. After a crash the trainer loads the newest training state and repeats the steps since
then with their recorded batches, which gives the same policies bit for bit.
So a crash at any instant loses nothing and consumes nothing twice."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import trio

from peers.engines.doctor import compute_findings
from peers.models.find import find_model
from peers.trainer.accepted import AcceptedSubmissions
from peers.trainer.beginning import Beginning
from peers.trainer.child import SERVICE, START_DEADLINE_SECONDS
from peers.trainer.collapse import UNREWARDED_ADVICE
from peers.trainer.collector import Collector
from peers.trainer.orders import Orders
from peers.trainer.publishing import Publisher
from peers.trainer.pushing import Pusher
from peers.trainer.saving import SavedStates
from peers.trainer.settings import TrainerSettings
from peers.trainer.store import TrainerStore
from peers.trainer.training import Training
from swarm.errors import SwarmError
from swarm.gossip.topics import RUN, WORK
from swarm.jobs.training import TrainingService, TrainingSetup
from swarm.node.run_node import RunNode
from swarm.run.bounds import check_batch
from swarm.run.findings import Finding, Work
from swarm.settings import PeerSettings
from swarm.wire.manifest import RunManifest
from swarm.world import ChildDied, client
from swarm.world.restarts import Restarts
from swarm.world.tasks import alongside

FINAL_WORD_SECONDS = 2.0
"""Time for the last order to spread before the trainer leaves."""


class TrainerRole:
    """Trains. Must run on a peer whose key the manifest names as a trainer.

    Its settings are those of `peers.trainer.settings`."""

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)
    Settings: ClassVar[type[TrainerSettings]] = TrainerSettings

    @staticmethod
    def check(settings: PeerSettings) -> None:
        """Fetch the models that have a name."""
        own, table = settings.of("trainer", TrainerSettings), settings.tables["trainer"]
        table["model"] = str(find_model(own.model, "trainer.model").folder)
        if own.teacher:
            table["teacher"] = str(find_model(own.teacher, "trainer.teacher").folder)

    @staticmethod
    async def doctor(settings: PeerSettings, work: Work | None, model: str | None) -> list[Finding]:
        """See `swarm.roles.Role`."""
        own = settings.of("trainer", TrainerSettings)
        found = await compute_findings(own, work, interpreter=own.interpreter or None)
        advice = "training takes several times as much; type: swarm trainer plan --model …"
        return [*found[:-1], replace(found[-1], text=f"{found[-1].text}; {advice}")]

    rank_module: ClassVar[str] = "peers.trainer.follower"

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._settings = settings = peer.node.settings.of("trainer", TrainerSettings)
        peer.keep_for_repeating(settings.save_steps)
        check_batch(peer.run.manifest, f"run {peer.run.id}")
        self._carried = False
        """Whether the submissions left in the pool at the end of the run are logged."""
        self._restarts = Restarts(peer.node.events, "trainer")
        store = TrainerStore(peer.node.disk.database("trainer.sqlite"))
        self._accepted = accepted = AcceptedSubmissions(peer, store)
        self._progress = progress = accepted.progress
        self._collector = Collector(accepted)
        self._orders = orders = Orders(accepted)
        states = SavedStates(peer.node.disk, settings, progress)
        self._publisher = publisher = Publisher(
            peer, accepted.log, progress, states, settings.mirrors
        )
        self._training = training = Training(
            settings, accepted, orders, publisher, self._restarts.succeeded
        )
        self._beginning = Beginning(settings, accepted, orders, publisher, training)
        aside = peer.node.disk.local_path("trainer/push")
        self._pusher = Pusher(settings.push, aside, peer.node.events)
        peer.gossip.listen(RunManifest, lambda _: progress.changed.touch())
        if not peer.run.manifest.is_standby(peer.peer_id):  # it would hold what it never uses
            self._collector.listen()

    async def run(self) -> None:
        """Train until every step of the run is done; a standby first waits for its turn."""
        if self._peer.run.manifest.is_standby(self._peer.peer_id):
            has_turn = await _stand_by(self._peer)
            if not has_turn:
                return  # the run has ended
        self._collector.listen()
        await self._accepted.store.open()
        async with trio.open_nursery() as nursery:
            await self._restarts.run(lambda: self._live(nursery))
            nursery.cancel_scope.cancel()

    async def _live(self, nursery: trio.Nursery) -> None:
        """Train from the newest durable state while the child lives; `nursery` outlives it."""
        try:
            await self._training.live(nursery, lambda: self._live_with_child(nursery))
        except ChildDied as error:
            if self._beginning.ranks > 1:
                raise SwarmError(f"{error}; torchrun starts all ranks together again") from error
            raise

    async def _live_with_child(self, nursery: trio.Nursery) -> None:
        async with self._peer.node.compute.child(
            SERVICE,
            TrainingSetup(hardware=self._settings.hardware),
            name="trainer",
            interpreter=self._settings.interpreter or None,
            start_deadline_seconds=START_DEADLINE_SECONDS,
        ) as process:
            child = client(TrainingService, process)
            await self._beginning.begin(child)
            if not self._orders.opened:
                await self._orders.open_first()
                self._collector.start(nursery)
                nursery.start_soon(self._orders.run)
                nursery.start_soon(self._beginning.place.watch)
                nursery.start_soon(self._training.evaluations.run)
                if self._settings.push:
                    nursery.start_soon(self._push_policies)
            while (figures := await self._training.take_step(child)) is not None:
                await self._beginning.lineages.heed(child, figures)
            await self._training.idle()
            await self._finish(child)

    async def _push_policies(self) -> None:
        """Push each policy whose step `push_steps` divides; one that is overtaken is left out."""
        while True:
            step = self._progress.policy - self._progress.policy % self._settings.push_steps
            if step > self._pusher.tried and step in self._progress.published:
                await self._push(step)
            else:
                await self._progress.changed.wait_change()

    async def _push(self, step: int) -> None:
        await self._pusher.push(step, Path(self._publisher.folders()[step]), self._peer.run)

    async def _finish(self, child: TrainingService) -> None:
        """Announce that the run is over, and upload the final policy."""
        if self._accepted.pool and not self._carried:
            self._carried = True
            await self._accepted.log.carried(self._accepted.pool.oldest_first())
        await self._orders.end()
        if self._settings.push:
            self._peer.status.doing = "uploading the policy"
            await self._push(self._progress.policy)
        self._peer.status.doing = "run over"
        self._peer.node.events.emit(
            "trainer.run_complete",
            steps=self._progress.policy,
            folder=self._publisher.folders()[self._progress.policy],
            unrewarded_steps=(unrewarded := self._beginning.lineages.alarms.unrewarded_steps),
            advice=UNREWARDED_ADVICE if unrewarded else "",
        )
        await child.end()
        await trio.sleep(FINAL_WORD_SECONDS)


async def _stand_by(peer: RunNode) -> bool:
    """Keep the newest policy until the manifest names this trainer; False: the run ended."""
    peer.status.doing = "standing by"
    peer.node.events.emit("standby.standing_by")
    async with alongside(peer.policies.follow, until=peer.run_over):
        while not peer.run.manifest.is_trainer(peer.peer_id):
            await peer.versions.changed.wait_change()
    return peer.run.manifest.is_trainer(peer.peer_id)
