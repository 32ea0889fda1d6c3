"""The inference role: generate the submissions that step orders ask for, and deliver them.

A child is asked for up to `ASKED_AT_ONCE` submissions of one policy at once, so that the device
stays busy while one ends, is delivered and judged; they are kept and delivered in the order of
their numbers. The order's nonce, this peer's id and the number determine prompts and noise."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, TypeVar

import trio

from peers.engines.doctor import machine, room
from peers.inference import doctor
from peers.inference.delivery import Deliveries
from peers.inference.idle import Cause, DeviceMeter
from peers.inference.outbox import Made
from peers.inference.pending import ASKED_AT_ONCE, PendingSubmission, PendingSubmissions
from peers.inference.proofs import ProofKeeper
from peers.inference.settings import InferenceSettings
from peers.inference.swapping import offer_newer
from peers.inference.turns import ServedTurns, Unwanted
from peers.sandbox.run import findings as sandbox_findings
from swarm.errors import PeerError
from swarm.gossip.topics import RUN
from swarm.jobs import Load, SubmissionOrder, inference, may_begin_with
from swarm.node.run_node import RunNode
from swarm.run import findings as screen
from swarm.run.work import check_rendering, submission_order
from swarm.settings import PeerSettings
from swarm.wire.manifest import RunManifest, Sampling
from swarm.wire.messages import CheckpointReference, StepOrder, Submission, Verdict
from swarm.world import ChildUserError, client, is_childs
from swarm.world.observable import complain
from swarm.world.restarts import Restarts
from swarm.world.tasks import alongside, open_guarded

STATES_PAUSE_SECONDS = 5.0
"""Pause after no peer had the states that a step continues, unless the order changes."""

ATTEMPTS_MAX = 3
"""Attempts at a submission whose environment fails over a turn. Then this peer ends with the
sentence."""

POLICIES_IN_MEMORY = 2
"""The policy in use, and the next policy while it is loaded."""

Fetched = TypeVar("Fetched")


class InferenceRole:
    """Contributes verified rollouts."""

    topics: ClassVar[tuple[str, ...]] = (RUN,)
    Settings: ClassVar[type[InferenceSettings]] = InferenceSettings
    service: ClassVar[str] = "peers.engines.service:EngineService"
    machine = staticmethod(sandbox_findings)
    doctor = staticmethod(doctor.findings)

    @staticmethod
    def check(settings: PeerSettings) -> None:
        """Raise `UserError` if the engine is not installed."""
        doctor.interpreter_of(settings)

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._node = peer.node
        self._run = peer.run
        self._events = peer.node.events
        self._settings = peer.node.settings.of("inference", InferenceSettings)
        self._proofs = ProofKeeper(peer, self._settings.proofs_kept_bytes)
        self._deliveries = Deliveries(peer, heard=self._proofs.hear)
        self._loaded: CheckpointReference | None = None
        self._restarts = Restarts(self._events, "engine")
        self._equipped = trio.Event()
        """Set once the child has found engine and environments, so that policies are needed."""
        self._resumed = False
        """Whether the submissions made before a restart are being delivered."""
        self._pending = PendingSubmissions()
        self._turns = ServedTurns(peer)
        self._meter = DeviceMeter(self._events)
        self._seconds_made = 0.0
        """How long the last submission took."""
        self._leaving = False
        self._surveyed: inference.Surveyed | None = None

    async def run(self) -> None:
        """Work until the run is over or the peer is cancelled."""
        settings = self._node.settings
        interpreter = doctor.interpreter_of(settings)
        await self._deliveries.open()
        setup = inference.InferenceSetup(
            engine=settings.engine,
            hardware=self._settings.hardware.in_run(self._run.manifest.thresholds.measured_dtypes),
            alter_weights=self._settings.alter_weights,
            round_weights=self._settings.round_weights,
            environments=self._run.manifest.environments,
            tokens_max=self._run.manifest.sampling.max_new_tokens,
        )
        async with (
            trio.open_nursery() as nursery,
            self._peer.messenger.answering({Verdict: self._deliveries.on_verdict}),
        ):
            nursery.start_soon(self._deliveries.run)
            nursery.start_soon(self._proofs.run)
            nursery.start_soon(self._follow_checkpoints)

            async def live() -> None:
                self._meter.idles("starting")
                self._loaded = None
                self._pending.forget()
                async with self._node.compute.child(
                    self.service, setup, name="engine", interpreter=interpreter
                ) as child:
                    engine = client(inference.InferenceService, child)
                    self._surveyed = await engine.survey()
                    self._equipped.set()
                    await self._work(engine)

            await self._restarts.run(live)
            await self._proofs.finish()
            nursery.cancel_scope.cancel()

    async def _work(self, engine: inference.InferenceService) -> None:
        """Use the child until the run is over; raises the first error of any task."""
        async with open_guarded() as guarded:

            def begin(pending: PendingSubmission) -> None:
                guarded.start_soon(partial(self._make, engine, pending))

            guarded.start_soon(partial(self._meter.follow, engine))
            guarded.start_soon(partial(self._offer_newer, engine))
            serve = partial(self._turns.serve, engine, lambda: self._pending.begun, self._stall)
            guarded.start_soon(serve)
            await guarded.guard(partial(self._generate_until_over, engine, begin))
            if self._leaving:
                await trio.sleep_forever()  # submissions may still be made; `leave` waits for them
            guarded.nursery.cancel_scope.cancel()

    async def leave(self) -> None:
        """Deliver whole submissions, of at most `leave_seconds`, and keep their receipts."""
        await self._finish_short()
        await self._proofs.finish()

    async def _finish_short(self) -> None:
        self._leaving = True
        seconds, now = self._settings.leave_seconds, self._node.world.now()
        begun = self._pending.begun
        wanted = [self._seconds_made - (now - pending.since) for pending in begun]
        short = sum(left <= seconds for left in wanted)  # the first ones: they end in order
        if short and seconds:
            self._events.emit("inference.leaving", seconds=seconds, reason="")
            with trio.move_on_after(seconds):
                await begun[short - 1].delivered.wait()
            return
        reason = "no submission is being generated"
        if wanted:
            reason = "the submission under way is abandoned"
            if seconds:
                reason += (
                    f": it needs about {wanted[0]:.0f} s more, and leave_seconds is {seconds:g}"
                )
        self._events.emit("inference.leaving", seconds=0.0, reason=reason)

    async def _offer_newer(self, engine: inference.InferenceService) -> None:
        def swappable() -> CheckpointReference | None:
            return self._loaded if self._run.manifest.sampling.swaps_max else None

        await offer_newer(self._peer, engine, swappable)

    async def _follow_checkpoints(self) -> None:
        await self._equipped.wait()
        await self._peer.policies.follow(POLICIES_IN_MEMORY)

    # --- generating --------------------------------------------------------------------------

    async def _generate_until_over(
        self, engine: inference.InferenceService, begin: Callable[[PendingSubmission], None]
    ) -> None:
        while not self._leaving:
            self._show_doing()
            async with alongside(partial(complain, self._say_without_work)):
                await self._peer.order.wait_until(lambda _: self._obstacle() is None)
            order = self._peer.step_order()
            if self._leaving:
                return
            assert order is not None
            if order.final:
                self._events.emit("inference.run_over", step=order.step)
                return
            await self._resume(order)
            if not self._pending.works_on(order):
                outbox = self._deliveries.outbox
                await outbox.forget_before(order.lineage, order.step - self._run.max_staleness)
                self._pending.start_step(order, outbox.next_number(order.lineage, order.step))
            self._peer.status.step = order.step
            if self._obstacle() is not None:
                continue  # all its numbers were made before a restart
            manifest = self._run.manifest_of(order)
            if manifest is None:
                self._meter.idles("waiting_for_order")
                self._peer.status.doing = f"waiting for version {order.run_version} of the run"
                await self._while_wanted(order, partial(self._peer.versions.manifest_of, order))
                continue
            if not may_begin_with(self._loaded, order.checkpoint, manifest.sampling):
                await self._load(engine, order, manifest.sampling)
                continue  # a newer order may have come meanwhile
            if not await self._has_states(order, manifest):
                continue
            begin(self._begin_submission(order, manifest))

    def _obstacle(self) -> Cause | None:
        """Why no submission may be begun now; None if one may, or the run is over."""
        cause = self._find_obstacle()
        if cause is not None:
            self._meter.idles(cause)
        return cause

    def _find_obstacle(self) -> Cause | None:
        order = self._peer.step_order()
        if order is None:
            return "waiting_for_order"
        return None if order.final else self._pending.obstacle(order, self._deliveries.room)

    def _show_doing(self) -> None:
        generating, begun = self._pending.generating, self._pending.begun
        if generating:
            busy = "" if self._meter.busy is None else f" ({100 * self._meter.busy:.0f} % busy)"
            doing = f"generating {generating[0].number} of step {generating[0].order.step}{busy}"
        elif begun:
            doing = f"delivering {begun[0].number} of step {begun[0].order.step}"
        else:
            doing = f"waiting for {'verdicts' if self._deliveries.room <= 0 else 'work'}"
        self._peer.status.doing = doing

    def _say_without_work(self, seconds: float) -> None:
        order, manifest = self._peer.step_order(), self._run.manifest
        if self._pending.generating:
            return
        cause = self._find_obstacle()
        waits = [trainer.peer for trainer in manifest.trainers]
        if cause in ("waiting_for_verdicts", "waiting_for_delivery"):
            waits = manifest.validator_ids()
        if order is None:
            reason = "no step order has come"
        elif cause == "waiting_for_verdicts":
            waiting = self._deliveries.under_way
            reason = f"{waiting} submissions have no verdict yet, the most this run allows"
        elif cause == "waiting_for_delivery":
            reason = f"no validator has taken the last submissions yet ({len(self._pending.begun)})"
        elif order.groups_wanted == 0:
            reason = f"step {order.step} wants no more work, and no other is open"
        else:
            reason = f"step {order.step} lets each peer make {order.submissions_max} submissions"
        self._peer.say_starved("inference", seconds, reason, waits)

    async def _resume(self, order: StepOrder) -> None:
        """Deliver what was made before a restart and has no verdict, and keep its numbers."""
        if self._resumed:
            return
        self._resumed = True
        outbox = self._deliveries.outbox
        await outbox.forget_before(order.lineage, order.step - self._run.max_staleness)
        await outbox.forget_undelivered(self._peer.entry)
        await outbox.sweep()
        waiting = outbox.waiting()
        number = outbox.next_number(order.lineage, order.step)
        if waiting or number:
            self._events.emit(
                "inference.resumed", submissions=len(waiting), step=order.step, number=number
            )
        for made in waiting:  # in the order of their numbers
            self._deliveries.add(made)

    def _show_ready(self, loaded: inference.Loaded) -> None:
        """Say once what was found on this machine, and what it can do with the first policy."""
        assert self._surveyed is not None
        work = screen.Work(self._run, self._peer.newest_checkpoint(), self._peer.step_order())
        found = [*machine(self._surveyed, work), room(loaded)]
        names = ", ".join(dict.fromkeys(e.name for e in self._run.manifest.environments))
        renders = "tasks are rendered as the run's owner renders them"
        found.append(screen.Finding("tasks", f"{names}: {renders}", {"rendered_alike": True}))
        self._events.emit("inference.ready", lines=screen.lines(found), **screen.figures(found))

    async def _load(
        self, engine: inference.InferenceService, order: StepOrder, sampling: Sampling
    ) -> None:
        """Load an order's policy once nothing is generated, unless swapped or superseded."""
        self._meter.idles("waiting_for_policy")
        self._peer.status.doing = f"fetching policy {order.policy}"
        with self._peer.store.pinned(order.checkpoint):
            folder = await self._while_wanted(
                order, partial(self._peer.policies.get, order.checkpoint)
            )
            if folder is None:
                return
            self._show_doing()
            await self._peer.order.wait_until(lambda _: not self._pending.generating)
            newest = self._peer.step_order()
            if newest is None or newest.checkpoint != order.checkpoint:
                return
            if may_begin_with(self._loaded, order.checkpoint, sampling):
                return
            self._meter.idles("loading_weights")
            self._peer.status.doing = f"loading policy {order.policy}"
            local = str(self._node.disk.local_path(folder))
            loaded = await engine.load(Load(policy=order.checkpoint, folder=local))
        if self._loaded is None:
            environments = self._run.manifest.environments
            await check_rendering(
                engine.probe, (each for each in environments if each.where == "local")
            )
            self._show_ready(loaded)
        self._note_policy(order.checkpoint, loaded.seconds)

    def _note_policy(self, policy: CheckpointReference, seconds: float) -> None:
        if policy != self._loaded:
            self._loaded = policy
            self._peer.status.policy = policy.step
            self._peer.checkpoint.touch()  # a newer one may be offered now
            self._events.emit("inference.policy_loaded", policy=policy.step, seconds=seconds)

    async def _while_wanted(
        self, order: StepOrder, fetch: Callable[[], Awaitable[Fetched]]
    ) -> Fetched | None:
        """`fetch`'s result; None if a newer order names another policy or version, or the end."""

        def wants(order: StepOrder) -> tuple[int, int, bool, bytes]:
            return order.lineage, order.policy, order.final, order.run_digest

        def is_superseded(_: object) -> bool:
            newest = self._peer.step_order()
            return newest is not None and wants(newest) != wants(order)

        def say(seconds: float) -> None:
            here = self._peer.policies.progress(order.checkpoint)
            trainers = [trainer.peer for trainer in self._run.manifest.trainers]
            reason = f"of policy {order.policy}, which step {order.step} uses, {here}"
            if self._run.manifest_of(order) is None:
                reason = f"version {order.run_version} of the run, which step {order.step} follows"
                reason += ", has not come"
            self._peer.say_starved("inference", seconds, reason, trainers)

        superseded = partial(self._peer.order.wait_until, is_superseded)
        async with alongside(partial(complain, say), until=superseded):
            return await fetch()
        return None

    async def _has_states(self, order: StepOrder, manifest: RunManifest) -> bool:
        """Fetch the step's states; False if the order was superseded, or no peer has them yet."""
        if not order.states:
            return True
        self._meter.idles("waiting_for_order")
        missing: list[str] = []

        async def fetch() -> None:
            try:
                await self._peer.states.of(order, manifest)
            except PeerError as error:
                missing.append(str(error))

        await self._while_wanted(order, fetch)
        if missing:
            self._events.emit("inference.states_missing", step=order.step, reason=missing[0])
            with trio.move_on_after(STATES_PAUSE_SECONDS):
                await self._peer.order.wait_change()
        return bool(self._peer.states.held(order)) and self._peer.step_order() == order

    def _begin_submission(self, order: StepOrder, manifest: RunManifest) -> PendingSubmission:
        """Take the step's next number."""
        pending = PendingSubmission(
            order=order,
            envelope=self._peer.order.value,
            asked=self._asked(order, manifest),
            entry=self._peer.entry,
            since=self._node.world.now(),
        )
        self._pending.begin(pending)
        return pending

    def _asked(self, order: StepOrder, manifest: RunManifest) -> SubmissionOrder:
        """What the child is asked for under the next number."""
        return submission_order(
            self._run.id,
            manifest,
            order,
            worker=self._peer.peer_id,
            number=self._pending.number,
            entry=self._peer.entry,
            states=self._peer.states.held(order),
        )

    async def _make(self, engine: inference.InferenceService, pending: PendingSubmission) -> None:
        """Generate a submission and see to its delivery."""
        order, number = pending.order, pending.number
        made = await self._generate(engine, pending)
        if made is None:
            return
        self._note_policy(made.policy, made.seconds_load)
        pending.generated = True
        seconds = self._seconds_made = self._node.world.now() - pending.since
        # Rollouts kept from before a restart took no time of this engine: hence the second bound.
        spent = max(made.seconds_generate, seconds / ASKED_AT_ONCE, 1e-6)
        self._peer.status.tokens_per_second = made.tokens / spent
        if made.slots_left:
            self._events.emit("inference.memory_short", slots=made.slots_left)
        submission = Submission(
            lineage=order.lineage,
            step=order.step,
            policy=order.policy,
            number=number,
            digest=made.digest,
            size_bytes=made.size_bytes,
            groups=made.groups,
            run_digest=order.run_digest,
            entry=pending.entry,
        )
        self._changed()
        if pending.before is not None:
            await pending.before.kept.wait()
            pending.before = None
        found = Made(submission, order.nonce, pending.path, pending.envelope, made.policies)
        await self._deliveries.outbox.keep(found)
        self._restarts.succeeded()
        self._events.emit(
            "inference.submission_made",
            submission=made.digest,
            step=order.step,
            policy=order.policy,
            number=number,
            tokens=made.tokens,
            seconds=seconds,
        )
        delivered = self._deliveries.add(found)
        pending.kept.set()
        self._changed()
        await delivered.wait()
        self._pending.end(pending, self._peer.step_order())
        self._changed()

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """The time in which a submission is asked for, for the meter and the heartbeats."""
        status = self._peer.status
        status.begins(self._node.world.now(), self._seconds_made)
        try:
            with self._meter.generating():
                yield
        finally:
            if not self._meter.asked:
                status.idle_since = self._node.world.now()

    async def _generate(
        self, engine: inference.InferenceService, pending: PendingSubmission
    ) -> inference.Generated | None:
        """Generate a submission, or give it up if no prompt is rendered or nobody wants it."""
        seed = pending.asked.seed()
        try:
            prompts = await self._turns.prompts(pending)
            path = str(self._node.disk.local_path(pending.path))
            job = inference.Generate(order=pending.asked, path=path, prompts=prompts)
            with self._generating():
                return await self._attempt(engine, pending, job)
        except (Unwanted, ChildUserError) as error:
            if isinstance(error, ChildUserError) and seed not in self._turns.unwanted:
                raise
            if isinstance(error, Unwanted) and error.failed is not None:
                self._deliveries.note_unmakeable(pending.order, pending.number, error.failed)
            self._events.emit(
                "inference.submission_given_up",
                step=pending.order.step,
                number=pending.number,
                reason=str(error),
            )
        finally:
            self._turns.forget(seed)
        pending.generated = True
        if pending.before is not None:
            await pending.before.kept.wait()
            pending.before = None
        pending.kept.set()
        self._pending.end(pending, self._peer.step_order())
        self._changed()
        return None

    async def _attempt(
        self,
        engine: inference.InferenceService,
        pending: PendingSubmission,
        job: inference.Generate,
    ) -> inference.Generated:
        """Generate a submission, again where an environment of this machine fails over a turn: it
        may be slow for a moment, the tokens are the same, and others in the batch go on."""
        attempt = 1
        while True:
            try:
                return await engine.generate(job)
            except ChildUserError as error:
                if not is_childs(error, inference.TurnFailed) or attempt == ATTEMPTS_MAX:
                    raise
                self._events.emit(
                    "inference.turn_failed",
                    step=pending.order.step,
                    number=pending.number,
                    reason=str(error),
                )
            self._turns.forget(pending.asked.seed())
            attempt += 1

    def _stall(self, submissions: int) -> None:
        if self._pending.stall(submissions):
            self._changed()

    def _changed(self) -> None:
        """Another submission may be allowed now."""
        self._show_doing()
        self._peer.order.touch()
