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
from peers.trainer.accepted import AcceptedSubmissions, Outcomes
from peers.trainer.alarms import (
    RECENT_STEPS,
    UNREWARDED,
    UNREWARDED_ADVICE,
    Alarm,
    Alarms,
)
from peers.trainer.child import SERVICE, START_DEADLINE_SECONDS, TrainerChild
from peers.trainer.collector import Collector
from peers.trainer.environments import Curricula
from peers.trainer.merging import Merging
from peers.trainer.orders import Forecast, Orders
from peers.trainer.pool import Pool
from peers.trainer.precedence import Precedence
from peers.trainer.progress import STEPS_REMEMBERED, Pause, Progress
from peers.trainer.publishing import Background, Publisher
from peers.trainer.refusals import Refusals
from peers.trainer.resuming import Resumption
from peers.trainer.saving import SavedStates, State
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
from swarm.ledger.entries import CheckpointPublished
from swarm.node.run_node import RunNode
from swarm.run.bounds import check_batch
from swarm.run.findings import Finding, Work
from swarm.run.manifest import manifest_in
from swarm.settings import PeerSettings
from swarm.wire.identity import PeerId
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Checkpoint, StepOrder
from swarm.world import ChildDied, client
from swarm.world.restarts import Restarts

LINEAGES_LEFT = 15
"""Lineages that a takeover leaves out: the trainer before may have rolled back unheard."""

LOOKS_SECONDS = (5.0, 30.0, 120.0)
"""Pauses before this trainer looks, after each new version of the run, whether a standby had its
place meanwhile: that one may still publish a policy until it hears of the version."""

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
        self._node = peer.node
        self._run = peer.run
        self._events = peer.node.events
        self._settings = settings = peer.node.settings.of("trainer", TrainerSettings)
        self._trusted = trusted = peer.trusted_part("trainer")
        peer.keep_for_repeating(settings.save_steps)
        check_batch(self._run.manifest, f"run {self._run.id}")
        self._restarts = Restarts(self._events, "trainer")
        self._alarms = Alarms(settings.limits)
        self._rollbacks = 0
        """Rollbacks in this process."""
        self._begun = False
        """Whether this process began or resumed the run: a restarted child then continues from the
        states on this disk without `--resume`."""
        self._carried = False
        """Whether the submissions left in the pool at the end of the run are logged."""
        self._ranks = 1
        """Processes that train together: the child, and ranks that this peer cannot restart."""
        self._progress = progress = Progress(peer.run)
        self._store = store = TrainerStore(peer.node.disk.database("trainer.sqlite"))
        self._states = states = SavedStates(peer.node.disk, peer.node.world, settings, progress)
        self._forecast = forecast = Forecast()
        self._outcomes = outcomes = Outcomes(trusted, self._events, progress, forecast)
        refusals = Refusals(peer, trusted, progress)
        pool = Pool()
        self._state_values = state_values = StateValues(peer, progress, pool)
        self._accepted = accepted = AcceptedSubmissions(
            peer, store, progress, forecast, outcomes, refusals, pool, state_values
        )
        self._pause = pause = Pause(peer, progress)
        precedence = Precedence(peer, store, refusals)
        self._collector = Collector(peer, progress, forecast, outcomes, accepted, precedence, pause)
        self._publisher = publisher = Publisher(peer, trusted, progress, settings.mirrors)
        curricula = Curricula(self._events)
        self._evaluations = evaluations = Evaluations(peer, settings)
        self._orders = Orders(
            peer, store, progress, forecast, pool, publisher, pause, curricula, state_values
        )
        self._batches = batches = Batches(
            peer,
            trusted,
            progress,
            forecast,
            accepted,
            self._orders,
            pause,
            settings.starved_seconds,
        )
        self._steps = steps = Steps(
            peer,
            progress,
            store,
            states,
            forecast,
            outcomes,
            accepted,
            batches,
            publisher,
            curricula,
            state_values,
            evaluations,
            pause,
            Merging(peer, progress, store, settings.exchange),
            self._restarts.succeeded,
        )
        self._curricula = curricula
        self._offering = Offering(peer, states, store, settings.standby_minutes * 60)
        self._resumption = Resumption(
            peer, progress, store, states, outcomes, accepted, publisher, steps
        )
        peer.gossip.listen(RunManifest, lambda _: progress.changed.touch())
        if not self._run.manifest.is_standby(peer.peer_id):  # it would hold what it never uses
            self._collector.listen()

    async def run(self) -> None:
        """Train until every step of the run is done; a standby first waits for its turn."""
        # A standby whose turn came while it was down, or was unpacking, has a bundle.
        stands_by = self._run.manifest.is_standby(self._peer.peer_id)
        if stands_by or holds_bundle(self._node.disk):
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
        self._steps.publishing = Background(nursery)
        try:
            await self._steps.publishing.run(lambda: self._live_with_child(nursery))
        except ChildDied as error:
            if self._ranks > 1:
                raise SwarmError(f"{error}; torchrun starts all ranks together again") from error
            raise

    async def _live_with_child(self, nursery: trio.Nursery) -> None:
        async with self._node.compute.child(
            SERVICE,
            TrainingSetup(hardware=self._settings.hardware),
            name="trainer",
            interpreter=self._settings.interpreter or None,
            start_deadline_seconds=START_DEADLINE_SECONDS,
        ) as process:
            service = client(TrainingService, process)
            child = TrainerChild(service, self._node.disk, self._settings)
            await self._begin(child)
            if not self._orders.opened:
                await self._orders.open_first()
                self._collector.start(nursery)
                nursery.start_soon(self._orders.run)
                nursery.start_soon(self._watch_place)
                nursery.start_soon(self._evaluations.run)
            while await self._take_step(child):
                pass
            await self._steps.publishing.idle()
            await self._finish(child)

    # --- beginning ---------------------------------------------------------------------------

    async def _begin(self, child: TrainerChild) -> None:
        """Begin the run from the base policy, or continue from the newest durable state."""
        inherited = self._states.inherited()
        states = self._states.all()
        restored = self._states.restored()
        newest = inherited or restored or (states[-1] if states else None)
        if newest is not None:
            self._continue_lineage(newest.lineage)
        if states and inherited is None and not self._begun and await self._is_outrun(states[-1]):
            inherited = states[-1]  # its own, and what another trainer did since is lost
        self._steps.applied_terms = self._progress.versions.follow(newest.step if newest else 0)
        manifest = manifest_in(self._steps.applied_terms)
        if states and not inherited and not self._node.settings.resume and not self._begun:
            raise UserError(
                f"this home has a trained state of step {states[-1].step} already; "
                "start the trainer with --resume, or with another --home"
            )
        if newest is None:
            await self._check_first()
        self._steps.merging.check(manifest)
        self._peer.status.doing = "loading"
        self._begun = True
        self._publisher.begin_life()
        self._ranks = await child.record_to(self._run.id, manifest)
        if not self._orders.opened:
            orders = self._store.newest_orders(self._progress.lineage, STEPS_REMEMBERED)
            await self._state_values.restore(orders)
        if inherited is not None or restored is not None:
            await self._plan(child, manifest)
        if restored is not None:
            await child.start(manifest, restored.folder, restored.step)
            inherited = await self._states.from_policy(child, restored)
        if inherited is not None:
            await self._inherit(child, manifest, inherited)
            return
        await self._states.drop_inherited()
        if newest is not None:
            await self._plan(child, manifest)
            why = await self._resumption.resume(
                child, manifest, newest, load=not self._orders.opened
            )
            if why:
                await self._roll_back(child, newest, why)
            return
        if not self._orders.opened:
            await self._accepted.load()
        if self._settings.prepare_base:
            self._peer.status.doing = "preparing the base policy"
            measured = await child.prepare_base()
            self._events.emit("trainer.evaluated", moment="before", **msgspec.to_builtins(measured))
        await self._plan(child, manifest)
        await child.start(manifest)
        self._progress.advance(0)
        await self._save_and_publish(child, 0)

    async def _check_first(self) -> None:
        """Refuse to begin a run that has begun: policies would be signed a second time.

        Raises `UserError`.
        """
        newest = await self._newest_logged()
        # The log of a trainer that is lost may be on no disk that a new peer can copy it from.
        if newest is not None or self._run.takeovers:
            has = f"published policy {newest[1]} already" if newest else "lost its trainer"
            raise UserError(
                f"run {self._run.id} has {has}, and this home has no training state; restore the "
                "home from a backup, let a standby take over with swarm trainer takeover, or begin "
                "with the run's newest policy by swarm trainer restore"
            )

    async def _is_outrun(self, own: State) -> bool:
        """Whether another trainer has led the run to a later lineage than that of `own`, while it
        had this one's place. Nobody follows the earlier one any more."""
        manifest = self._run.manifest
        if manifest.outer.rounds or not (manifest.standbys or self._run.takeovers):
            return False
        return max(await self._newest_lineages(), default=0) > own.lineage

    async def _watch_place(self) -> None:
        """End this trainer if it did not notice that a standby took its place for a while: the
        owner's next version may have put it back before it heard of that."""
        while True:
            await self._peer.versions.changed.wait_change()
            for pause in LOOKS_SECONDS:
                await trio.sleep(pause)
                lineage = self._progress.lineage
                if await self._is_outrun(State(lineage, 0)) and lineage == self._progress.lineage:
                    raise SwarmError(
                        f"a standby has led run {self._run.id} beyond this trainer's lineage "
                        f"{lineage}, and the owner has put the trainer back; start it again with "
                        "--resume, and it goes on above that"
                    )

    async def _newest_lineages(self) -> list[int]:
        """The newest lineages that this peer has heard of or reads in the trusted peers' logs."""
        logged = await self._newest_logged()
        heard = [each.message for each in self._peer.newest()]
        lineages = [each.order()[0] for each in heard if isinstance(each, (Checkpoint, StepOrder))]
        return lineages if logged is None else [logged[0], *lineages]

    async def _newest_logged(self) -> tuple[int, int] | None:
        """(lineage, step) of the newest policy that any trusted peer's log lists as published."""
        await self._trusted.restored()
        manifest = self._run.manifest
        await self._trusted.catch_up([*manifest.trainer_ids(), *manifest.standby_ids()])
        logged = [
            (entry.lineage, entry.step)
            for owner in self._run.manifest.trusted_ids()
            for entry in self._outcomes.entries(PeerId(owner))
            if isinstance(entry, CheckpointPublished)
        ]
        return max(logged, default=None)

    async def _inherit(self, child: TrainerChild, manifest: RunManifest, state: State) -> None:
        """Continue in the place of another trainer from a state, in a new lineage.

        The newest lineage is abandoned: rollouts of the steps since the state are stale, and
        whatever that trainer may still sign there, nobody continues.
        """
        newest = max([state.lineage, *await self._newest_lineages()])
        consumed = await child.resume(manifest, state.folder, {})
        self._states.loaded(state)
        self._progress.advance(state.step)
        self._accepted.remember_consumed(dict.fromkeys(consumed, state.step))
        await self._accepted.load()  # of a home that has trained before: all of it is stale
        order = await self._states.inherited_order()
        orders = [order] if order is not None else self._store.newest_orders(state.lineage, 1)
        self._curricula.restore(orders)
        # Of two standbys that take over at once, the one that prevails has the later lineage.
        places = max(1, len(self._run.manifest.standbys))
        ahead = places - min(self._run.standby_place, places - 1)
        self._progress.lineage = newest + ahead * (LINEAGES_LEFT + 1) - 1
        await self._roll_back(child, state, f"took over from the trainer of lineage {newest}")
        await self._states.drop_inherited()

    async def _save_and_publish(self, child: TrainerChild, step: int) -> None:
        """Write the state of policy `step`, which begins a lineage, and publish it."""
        state = State(self._progress.lineage, step)
        await self._states.begin(child, await self._publisher.clear_export(step), state)
        await self._states.finish(child, state)
        self._publisher.exported(step)
        await self._publisher.publish(child, step, reward=0.0)

    async def _plan(self, child: TrainerChild, manifest: RunManifest) -> None:
        """Say what the trainer will hold in memory; raises `UserError` if it does not fit."""
        found = await child.plan(manifest)
        self._events.emit(
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

    def _continue_lineage(self, lineage: int) -> None:
        """Restore the lineage and the version of the run that each of its steps follows."""
        if lineage != self._progress.lineage:
            self._progress.versions.clear()
        self._progress.lineage = lineage
        self._progress.versions.restore(self._store.newest_orders(lineage, STEPS_REMEMBERED))

    # --- one step ----------------------------------------------------------------------------

    async def _take_step(self, child: TrainerChild) -> bool:
        """Turn the newest policy into the next one; False once the run has no further step."""
        if self._progress.over:
            return False
        step = self._progress.step
        await self._steps.apply_terms(child, step)
        times = StepTimes(began=self._node.world.now())
        self._batches.begin_step()
        trained = await self._steps.train(child, step, times)
        if trained is None:
            return False
        await self._steps.hand_over(child, step, trained, times)
        await self._heed(child, step, self._alarms.look(trained.figures))
        return True

    # --- when it goes wrong ------------------------------------------------------------------

    async def _heed(self, child: TrainerChild, step: int, alarms: list[Alarm]) -> None:
        """Report alarms, then act as `alarm_action` says."""
        for alarm in alarms:
            self._events.emit(
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
        await self._steps.publishing.idle()
        why = f"step {step}: {'; '.join(alarm.sentence for alarm in alarms)}"
        if self._settings.alarm_action == "rollback":
            good = [state for state in self._states.all() if state.step <= step + 1 - RECENT_STEPS]
            if good and self._rollbacks < self._settings.rollbacks_max:
                await self._roll_back(child, good[-1], why)
                return
        await self._pause.hold(why)

    async def _roll_back(self, child: TrainerChild, state: State, why: str) -> None:
        """Continue from an older state in a new lineage.

        The lineage inherits the consumed list, so nothing is trained on twice. Rollouts of the
        abandoned policies are stale.
        """
        await self._steps.publishing.idle()
        self._rollbacks += 1
        self._peer.status.doing = f"rolling back to step {state.step}"
        lineage, step = self._progress.lineage + 1, state.step
        async with self._orders.reopened():
            await child.roll_back(state.folder, self._publisher.folders(), lineage)
            self._progress.begin_lineage(lineage, step)
            self._publisher.forget_lineage()
            self._forecast.forget_announced()
            self._alarms = Alarms(self._settings.limits)
            await self._accepted.drop_stale()  # the whole pool, which belongs to the old lineage
            self._events.emit("trainer.rolled_back", step=step, lineage=lineage, reason=why)
            await self._save_and_publish(child, step)
        await self._accepted.forget_unsaved()

    # --- ending ------------------------------------------------------------------------------

    async def _finish(self, child: TrainerChild) -> None:
        """Announce that the run is over, and evaluate the final policy."""
        if self._accepted.pool and not self._carried:
            self._carried = True
            await self._outcomes.carried(self._accepted.pool.oldest_first())
        await self._orders.end()
        folder = self._publisher.newest_folder()
        if self._settings.evaluate:
            self._peer.status.doing = "evaluating"
            measured = await child.evaluate(folder)
            self._events.emit("trainer.evaluated", moment="after", **msgspec.to_builtins(measured))
        self._peer.status.doing = "run over"
        self._events.emit(
            "trainer.run_complete",
            steps=self._progress.policy,
            folder=str(self._node.disk.local_path(folder)),
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
