"""The trainer role: open steps, collect accepted submissions, train, publish.

Four tasks run concurrently. The `Collector` turns the validators' verdicts into a durable
pool of accepted submissions. `Orders` keeps the right step open. The main loop takes batches from
the pool and has a child process step the optimiser. Beside the next step's training, the new policy
is written and published.

A batch is recorded before anything of it leaves this disk, and a policy is durable before it is
announced. After a crash the trainer loads the newest training state and repeats the steps since
then with their recorded batches, which gives the same policies bit for bit.
So a crash at any instant loses nothing and consumes nothing twice.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec
import trio

from peers.engines.doctor import compute_findings
from peers.evaluation.during import Evaluations
from peers.trainer.accepted import AcceptedSubmissions, TrainerLog
from peers.trainer.alarms import RECENT_STEPS, UNREWARDED, UNREWARDED_ADVICE, Alarm, Alarms
from peers.trainer.child import SERVICE, START_DEADLINE_SECONDS, TrainerChild
from peers.trainer.collector import Collector
from peers.trainer.environments import Curricula
from peers.trainer.figures import StepReports
from peers.trainer.merging import Merging
from peers.trainer.orders import Forecast, Orders
from peers.trainer.precedence import Precedence
from peers.trainer.progress import Progress, hold
from peers.trainer.publishing import Background, Handover, Publisher
from peers.trainer.resuming import Lineages, Place, Resumption
from peers.trainer.saving import SavedStates
from peers.trainer.settings import TrainerSettings
from peers.trainer.standby.following import StandingBy, holds_bundle
from peers.trainer.standby.offering import Offering
from peers.trainer.state_values import StateValues
from peers.trainer.steps import Batches, Steps, StepTimes
from peers.trainer.store import TrainerStore
from swarm.errors import SwarmError, UserError
from swarm.gossip.topics import RUN, WORK
from swarm.jobs.memory import MemoryPlan, fullest, shown
from swarm.jobs.training import TrainingService, TrainingSetup
from swarm.node.run_node import RunNode
from swarm.run.bounds import check_batch
from swarm.run.findings import Finding, Work
from swarm.settings import PeerSettings
from swarm.wire.manifest import RunManifest
from swarm.world import ChildDied, client
from swarm.world.restarts import Restarts

FINAL_WORD_SECONDS = 2.0
"""Time for the last order to spread before the trainer leaves."""


class TrainerRole:
    """Trains. Must run on a peer whose key the manifest names as a trainer.

    Its settings are those of `peers.trainer.settings`.
    """

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)
    Settings: ClassVar[type[TrainerSettings]] = TrainerSettings

    @staticmethod
    async def doctor(
        settings: PeerSettings, work: Work | None, model: Path | None
    ) -> list[Finding]:
        """See `swarm.roles.Role`."""
        own = settings.of("trainer", TrainerSettings)
        found = await compute_findings(own, work, interpreter=own.interpreter or None)
        advice = "training takes several times as much; type: swarm trainer plan --model …"
        return [*found[:-1], replace(found[-1], text=f"{found[-1].text}; {advice}")]

    rank_module: ClassVar[str] = "peers.trainer.follower"

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._settings = settings = peer.node.settings.of("trainer", TrainerSettings)
        trusted = peer.trusted_part("trainer")
        peer.keep_for_repeating(settings.save_steps)
        check_batch(peer.run.manifest, f"run {peer.run.id}")
        self._begun = False
        """Whether this process began or resumed the run: a restarted child then continues from the
        states on this disk without `--resume`."""
        self._carried = False
        """Whether the submissions left in the pool at the end of the run are logged."""
        self._ranks = 1
        """Processes that train together: the child, and ranks that this peer cannot restart."""
        self._restarts = Restarts(peer.node.events, "trainer")
        self._alarms = Alarms(settings.limits)
        self._progress = progress = Progress(peer.run)
        self._store = store = TrainerStore(peer.node.disk.database("trainer.sqlite"))

        forecast = Forecast()
        log = TrainerLog(peer, trusted, progress, forecast)
        values = StateValues(peer, progress)
        self._accepted = AcceptedSubmissions(peer, store, progress, forecast, log, values)
        accepted = self._accepted
        precedence = Precedence(peer, store, accepted.refusals)
        self._collector = Collector(peer, progress, forecast, log, accepted, precedence)
        curricula = Curricula(peer.node.events)
        self._orders = Orders(peer, store, progress, forecast, accepted.pool, curricula, values)
        orders = self._orders

        batches = Batches(
            peer, trusted, progress, forecast, accepted, orders, settings.starved_seconds
        )
        merging = Merging(peer, progress, store, settings.exchange)
        self._steps = Steps(peer, progress, batches, log, curricula, values, merging)
        self._evaluations = Evaluations(peer, settings)

        self._states = SavedStates(peer.node.disk, peer.node.world, settings, progress)
        self._publisher = Publisher(peer, log, progress, self._states, settings.mirrors)
        publisher = self._publisher
        reports = StepReports(
            peer.node.events, progress, forecast, log, batches, curricula, self._evaluations
        )
        self._handover = handover = Handover(
            peer, progress, accepted, publisher, merging, reports, self._restarts.succeeded
        )
        self._offering = Offering(peer, self._states, store, settings.standby_minutes * 60)

        self._place = Place(peer, progress, log)
        self._lineages = Lineages(
            peer, progress, orders, accepted, publisher, handover, self._alarms
        )
        self._resumption = Resumption(
            peer, progress, store, accepted, publisher, self._steps, handover
        )
        peer.gossip.listen(RunManifest, lambda _: progress.changed.touch())
        if not peer.run.manifest.is_standby(peer.peer_id):  # it would hold what it never uses
            self._collector.listen()

    async def run(self) -> None:
        """Train until every step of the run is done; a standby first waits for its turn."""
        # A standby whose turn came while it was down, or was unpacking, has a bundle.
        stands_by = self._peer.run.manifest.is_standby(self._peer.peer_id)
        if stands_by or holds_bundle(self._peer.node.disk):
            has_turn = await StandingBy(self._peer).until_trainer()
            if not has_turn:
                return  # the run has ended
        self._collector.listen()
        await self._store.open()
        await self._offering.open()
        async with trio.open_nursery() as nursery:
            await self._restarts.run(lambda: self._live(nursery))
            nursery.cancel_scope.cancel()

    async def _live(self, nursery: trio.Nursery) -> None:
        """Train while the child lives, from the newest durable state.

        Collecting, ordering and publishing run in `nursery`, which outlives the child.
        """
        self._handover.background = Background(nursery)
        try:
            await self._handover.background.run(lambda: self._live_with_child(nursery))
        except ChildDied as error:
            if self._ranks > 1:
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
            service = client(TrainingService, process)
            child = TrainerChild(service, self._peer.node.disk, self._settings)
            await self._begin(child)
            if not self._orders.opened:
                await self._orders.open_first()
                self._collector.start(nursery)
                nursery.start_soon(self._orders.run)
                nursery.start_soon(self._place.watch)
                nursery.start_soon(self._evaluations.run)
            while await self._take_step(child):
                pass
            await self._handover.background.idle()
            await self._finish(child)

    # --- beginning ---------------------------------------------------------------------------

    async def _begin(self, child: TrainerChild) -> None:
        """Begin the run from the base policy, or continue from the newest durable state."""
        inherited = self._states.inherited()
        states = self._states.all()
        restored = self._states.restored()
        newest = inherited or restored or (states[-1] if states else None)
        if newest is not None:
            self._orders.continue_lineage(newest.lineage)
        if (
            states
            and inherited is None
            and not self._begun
            and await self._place.is_outrun(states[-1])
        ):
            inherited = states[-1]  # its own, and what another trainer did since is lost
        manifest = self._steps.follow(newest.step if newest else 0)
        if states and not inherited and not self._peer.node.settings.resume and not self._begun:
            raise UserError(
                f"this home has a trained state of step {states[-1].step} already; "
                "start the trainer with --resume, or with another --home"
            )
        if newest is None:
            await self._place.check_first()
        self._steps.merging.check(manifest)
        self._peer.status.doing = "loading"
        self._begun = True
        self._publisher.begin_life()
        self._ranks = await child.record_to(self._peer.run.id, manifest)
        if not self._orders.opened:
            await self._orders.restore_states()
        if inherited is not None or restored is not None:
            await self._plan(child, manifest)
        if restored is not None:
            await child.start(manifest, restored.folder, restored.step)
            inherited = await self._states.from_policy(child, restored)
        if inherited is not None:
            newest_lineage = max(await self._place.newest_lineages(), default=0)
            await self._lineages.inherit(child, manifest, inherited, newest_lineage)
            return
        await self._states.drop_inherited()
        if newest is not None:
            await self._plan(child, manifest)
            why = await self._resumption.resume(
                child, manifest, newest, load=not self._orders.opened
            )
            if why:
                await self._lineages.roll_back(child, newest, why)
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

    # --- one step ----------------------------------------------------------------------------

    async def _take_step(self, child: TrainerChild) -> bool:
        """Turn the newest policy into the next one; False once the run has no further step."""
        if self._progress.over:
            return False
        step = self._progress.step
        await self._steps.apply_terms(child, step)
        times = StepTimes(began=self._peer.node.world.now())
        self._steps.batches.begin_step()
        trained = await self._steps.train(child, step, times)
        if trained is None:
            return False
        await self._handover.hand_over(child, step, trained, times)
        await self._heed(child, step, self._alarms.look(trained.figures))
        return True

    # --- when it goes wrong ------------------------------------------------------------------

    async def _heed(self, child: TrainerChild, step: int, alarms: list[Alarm]) -> None:
        """Report alarms, then act as `alarm_action` says."""
        for alarm in alarms:
            self._peer.node.events.emit(
                "trainer.alarm",
                step=step,
                sign=alarm.name,
                figure=alarm.figure,
                limit=alarm.limit,
                sentence=alarm.sentence,
            )
        alarms = [alarm for alarm in alarms if alarm.name != UNREWARDED]
        if not alarms or self._settings.alarm_action == "report":
            return
        await self._handover.background.idle()
        why = f"step {step}: {'; '.join(alarm.sentence for alarm in alarms)}"
        if self._settings.alarm_action == "rollback":
            good = [state for state in self._states.all() if state.step <= step + 1 - RECENT_STEPS]
            if good and self._lineages.rollbacks < self._settings.rollbacks_max:
                await self._lineages.roll_back(child, good[-1], why)
                return
        await hold(self._peer, self._progress, why)

    # --- ending ------------------------------------------------------------------------------

    async def _finish(self, child: TrainerChild) -> None:
        """Announce that the run is over, and evaluate the final policy."""
        if self._accepted.pool and not self._carried:
            self._carried = True
            await self._accepted.log.carried(self._accepted.pool.oldest_first())
        await self._orders.end()
        folder = self._publisher.newest_folder()
        if self._settings.evaluate:
            self._peer.status.doing = "evaluating"
            measured = await child.evaluate(folder)
            self._peer.node.events.emit(
                "trainer.evaluated", moment="after", **msgspec.to_builtins(measured)
            )
        self._peer.status.doing = "run over"
        self._peer.node.events.emit(
            "trainer.run_complete",
            steps=self._progress.policy,
            folder=str(self._peer.node.disk.local_path(folder)),
            unrewarded_steps=(unrewarded := self._alarms.unrewarded_steps),
            advice=UNREWARDED_ADVICE if unrewarded else "",
        )
        await child.end()
        await self._offering.hand_over()
        self._peer.status.doing = "run over"
        await trio.sleep(FINAL_WORD_SECONDS)


def _words(found: MemoryPlan, memory: str) -> list[str]:
    """The parts of a rank's memory in its fullest phase, each with its size."""
    return [f"{part.name} {shown(part.bytes)}" for part in fullest(found.parts, memory)]
