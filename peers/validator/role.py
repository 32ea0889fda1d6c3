"""The validator role: receive submissions, check them, sign verdicts.

A worker pushes a submission (`inbox`), then announces it (`reception`); the acknowledgement says
that it is stored durably. Cases are judged in the order of their numbers (`queue`), several
workers' at a time (`lanes`), by two child processes (`examiner`): `inspector`, then `prefill`. The
verdict is durable in the log before it is published (`verdicts`)."""

from typing import ClassVar, Literal

import pydantic
import trio

from peers.engines.doctor import compute_findings, task_findings
from peers.engines.installed import PREFILLS
from peers.evaluation.during import Evaluations
from peers.evaluation.settings import EvaluationSettings
from peers.sandbox.run import findings as sandbox_findings
from peers.validator.audits import Audits
from peers.validator.docket import Docket
from peers.validator.eviction import Records
from peers.validator.examiner import Examiner
from peers.validator.inbox import Client, Inbox
from peers.validator.lanes import Lanes
from peers.validator.penalties import Penalties
from peers.validator.queue import CaseQueue
from peers.validator.reception import Reception
from peers.validator.second import SecondOpinions
from peers.validator.verdicts import VERDICTS_RECOVERED_MAX, Verdicts
from swarm.gossip.topics import RUN, WORK
from swarm.jobs import Hardware
from swarm.jobs.validation import PrefillService, PrefillSetup
from swarm.node.run_node import RunNode
from swarm.run.findings import Finding, Work
from swarm.run.heard_verdicts import report_contradictions
from swarm.settings import PeerSettings
from swarm.shardcast.held import Change, Held
from swarm.wire.envelope import Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Acknowledgement, StepOrder, Submission, Verdict
from swarm.world import client
from swarm.world.restarts import Restarts

POLICIES_IN_MEMORY = 2
"""The policy in use, and the previous or the next one."""

TIDY_SECONDS = 15.0
"""Seconds between removals of verdicts and files that can no longer be trained on."""

WAITING, READY = "waiting for a policy", "ready to judge"
"""What it does while it judges nothing."""

OLDER_STEPS_KEPT = 2
"""Steps beyond `max_staleness` for which verdicts and files are kept, as a trainer may lag."""


class ValidatorSettings(EvaluationSettings):
    """`[validator]`: how this peer recomputes submissions and evaluates policies."""

    lanes: int = pydantic.Field(default=2, ge=1, le=64)
    devices: list[str] = pydantic.Field(default=[])
    adapters: Literal["auto", "merged", "unmerged"] = "auto"

    @property
    def hardware(self) -> Hardware:
        return self.filled(Hardware)


class ValidatorRole:
    """Judges submissions. Must run on a peer whose key the manifest names as a validator."""

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)
    Settings: ClassVar[type[ValidatorSettings]] = ValidatorSettings
    machine = staticmethod(sandbox_findings)

    @staticmethod
    async def doctor(settings: PeerSettings, work: Work | None, model: str | None) -> list[Finding]:
        """See `swarm.roles.Role`."""
        own = settings.of("validator", ValidatorSettings)
        found = await compute_findings(own, work, interpreter=own.interpreter or None, model=model)
        return [*found, *task_findings(settings, work)]

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._node = peer.node
        self._run = peer.run
        self._settings = peer.node.settings.of("validator", ValidatorSettings)
        self._trusted = peer.trusted_part("validator")
        self._docket = Docket(peer.peer_id)
        self._inbox = Inbox(
            peer.run,
            peer.node.disk,
            peer.node.world,
            judged=lambda key: self._docket.verdict_on(key) is not None,
            client_of=self._client_of,
        )
        self._penalties = Penalties(peer.node.world, peer.peer_id)
        self._queue = CaseQueue(
            self._node.disk.database("validator.sqlite"),
            self._docket,
            self._inbox,
            self._node.events,
            lanes=self._settings.lanes,
            is_proven=self._is_proven,
        )
        records = Records(peer.run, self._trusted)
        self._verdicts = Verdicts(
            peer, self._trusted, self._docket, self._inbox, self._queue, records
        )
        self._prefill_restarts = Restarts(self._node.events, "prefill")
        self._examiner = Examiner(peer, records, self._queue, self._prefill_restarts)
        self._audits = Audits(peer, self._queue, self._examiner, self._verdicts)
        self._equipped = trio.Event()
        """Set once the children have found engine and environment, so that policies are needed."""
        self._lanes = Lanes(
            peer,
            self._queue,
            self._examiner,
            self._verdicts,
            self._settings.interpreter or None,
            self._equipped,
            self._inbox,
            self._settings.lanes,
        )
        self._second = SecondOpinions(peer, self._trusted, self._docket, self._inbox, self._queue)
        self._evaluations = Evaluations(peer, self._settings)
        peer.gossip.listen(StepOrder, self._docket.orders.take)
        peer.gossip.listen(Verdict, self._hear)
        peer.gossip.listen(Verdict, self._penalties.hear)
        peer.gossip.listen(Acknowledgement, self._hear)

    def _is_proven(self, worker: str) -> bool:
        order = self._peer.step_order()
        stake = self._trusted.stake(worker, order.step if order else 0)
        return stake >= self._run.manifest.thresholds.proven_tokens

    def _client_of(self, worker: PeerId) -> Client:
        return Client(
            network=self._node.transport.network_of(worker),
            proven=self._is_proven(worker),
            helper=self._trusted.registrar.is_helper(worker),
            pause_seconds=self._penalties.pause_seconds(worker),
        )

    def _hear(self, envelope: Envelope) -> None:
        if isinstance(envelope.message, Verdict):
            self._second.hear(envelope)
        report_contradictions(self._docket.hear(envelope), envelope, self._node.events)

    async def run(self) -> None:
        """Judge until cancelled."""
        given = self._trusted.tables.verdicts(VERDICTS_RECOVERED_MAX)
        for envelope in given:
            self._penalties.hear(envelope)
        await self._verdicts.recover(given)
        await self._queue.open()
        await self._inbox.remove_others(
            {*(case.key for case in self._queue.cases()), *self._docket.judged_here()}
        )
        self._audits.recover(map(self._docket.verdict_here, self._docket.judged_here()))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_checkpoints)
            nursery.start_soon(self._inbox.run)
            nursery.start_soon(self._tidy)
            nursery.start_soon(self._audits.run, nursery)
            nursery.start_soon(self._second.run)
            nursery.start_soon(self._evaluations.run)
            nursery.start_soon(self._second.recover, self._hear)
            reception = Reception(
                self._peer, self._docket, self._inbox, self._queue, self._penalties
            )
            self._peer.store.watch(self._note_policy)
            self._peer.status.doing = READY if self._peer.store.complete() else WAITING
            async with self._peer.messenger.answering({Submission: reception.answer}):
                # Not earlier: a push that cannot be announced yet would use up its worker's quota.
                self._peer.blobs.inbox = self._inbox
                try:
                    await self._prefill_restarts.run(lambda: self._live(nursery))
                finally:
                    self._peer.blobs.inbox = None

    def _note_policy(self, change: Change, held: Held, index: int) -> None:
        """Say so once the first policy is here: without one nothing can be judged."""
        if change is Change.COMPLETE and self._peer.status.doing == WAITING:
            self._peer.status.doing = READY

    async def _follow_checkpoints(self) -> None:
        await self._equipped.wait()
        await self._peer.policies.follow(POLICIES_IN_MEMORY)

    async def _tidy(self) -> None:
        while True:
            await trio.sleep(TIDY_SECONDS)
            await self._verdicts.forget_older(self._run.max_staleness + OLDER_STEPS_KEPT)

    # --- judging -----------------------------------------------------------------------------

    async def _live(self, nursery: trio.Nursery) -> None:
        """Judge while the prefill child lives: it survives the inspectors, as loading is slow."""
        self._examiner.forget_loaded()
        engine = self._node.settings.engine
        async with self._node.compute.child(
            "peers.validator.prefill:PrefillService",
            PrefillSetup(
                policies_kept=POLICIES_IN_MEMORY,
                engine=PREFILLS.get(engine, engine),
                hardware=self._settings.hardware.in_run(
                    self._run.manifest.thresholds.measured_dtypes
                ),
            ),
            name="prefill",
            interpreter=self._settings.interpreter or None,
        ) as prefill:
            serving = client(PrefillService, prefill)
            with self._audits.using(serving):
                await self._lanes.run(serving, nursery)
