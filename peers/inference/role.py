"""The inference role: generate the submissions that step orders ask for, and deliver them.

One loop generates (in a child process); one task per submission delivers it until its verdict.
The order's nonce, this peer's id and the submission number determine prompts and noise. A peer
that restarts goes on with the next number of the step, and delivers again what has no verdict.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import ClassVar, Literal, TypeVar

import pydantic
import trio

from peers.engines.installed import interpreter_for
from peers.inference import preflight
from peers.inference.delivery import Deliveries
from peers.inference.outbox import Made, path_of
from peers.inference.quantised import check_quantised
from swarm.errors import UserError
from swarm.gossip.topics import RUN
from swarm.jobs import Hardware, Load, SubmissionOrder
from swarm.jobs.inference import (
    Generate,
    InferenceService,
    InferenceSetup,
    Loaded,
    Probe,
    Survey,
    Surveyed,
)
from swarm.messages import CheckpointReference, StepOrder, Submission, Verdict
from swarm.node.run_node import RunNode
from swarm.observable import complain
from swarm.rollouts.seeds import nonce_of
from swarm.settings import ComputeSettings
from swarm.world import client
from swarm.world.restarts import Restarts

POLICIES_IN_MEMORY = 2
"""The policy in use, and the next policy while it is loaded."""

Fetched = TypeVar("Fetched")


class InferenceSettings(ComputeSettings):
    """`[inference]`: how this peer generates."""

    alter_weights: float = pydantic.Field(default=0.0, ge=0)
    """Relative size of noise added to the weights: how the demo's cheater cheats, and is caught."""
    memory_share: float = pydantic.Field(default=0.9, gt=0, lt=1)
    """Share of memory for caches: native and on a CPU, of what is free once the weights are
    loaded; vLLM on a GPU, of the device's memory, weights included."""
    slots: int = pydantic.Field(default=0, ge=0)
    """Most completions generated at once. 0: native 256 (64 with `devices` or `stages`); vLLM 64 on
    a CPU, its own default on a GPU."""
    length_max: int = pydantic.Field(default=0, ge=0)
    """vLLM: longest sequence, for a model whose full length does not fit into the cache. 0: the
    model's context length."""
    tensor_parallel: int = pydantic.Field(default=1, ge=1)
    """vLLM: devices that share each layer."""
    pipeline_parallel: int = pydantic.Field(default=1, ge=1)
    """vLLM: groups of devices that share the layers among them."""
    leave_seconds: float = pydantic.Field(default=20.0, ge=0)
    """Most seconds to finish and deliver a submission after Ctrl-C or SIGTERM. 0: leave at once."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Decode with CUDA graphs on a GPU, which launch a step's kernels at once. auto: native only;
    on: vLLM, too."""
    quantise: Literal["none", "fp8"] = "none"
    """vLLM: round weights to this format after loading. Only in a run whose
    `thresholds.quantised_weights` names it."""

    devices: list[str] = pydantic.Field(default=[])
    """native: devices of this machine that share the layers of a model too large for one, for
    example `["cuda:0", "cuda:1"]`."""
    stages: list[str] = pydantic.Field(default=[])
    """native: addresses of `swarm engine stage` processes that share the layers, in order, for
    example `["127.0.0.1:7001", "127.0.0.1:7002"]`."""
    stage_layers: list[int] = pydantic.Field(default=[])
    """native: layers of each of `devices` or `stages`. Empty: equal numbers."""
    stage_secret: str = ""
    """native: file with the secret of the `stages`."""
    adapters: Literal["merged", "unmerged"] = "merged"
    """native: whether LoRA adapters become part of the weights, or are computed beside them:
    slower by two thin products per matrix, but a new policy is read in an instant. `devices` and
    `stages` merge."""

    @property
    def hardware(self) -> Hardware:
        names = Hardware.__struct_fields__
        return Hardware(**{name: getattr(self, name) for name in names})


class InferenceRole:
    """Contributes verified rollouts."""

    topics: ClassVar[tuple[str, ...]] = (RUN,)
    Settings: ClassVar[type[InferenceSettings]] = InferenceSettings
    service: ClassVar[str] = "peers.inference.engine_service:EngineService"
    """The service in this role's child."""

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._node = peer.node
        self._run = peer.run
        self._events = peer.node.events
        self._settings = peer.node.settings.of("inference", InferenceSettings)
        self._deliveries = Deliveries(peer)
        self._loaded: CheckpointReference | None = None
        self._step: tuple[int, int] = (-1, -1)
        self._number = 0
        self._restarts = Restarts(self._events, "engine")
        self._equipped = trio.Event()
        """Set once the child has found engine and environments, so that policies are needed."""
        self._resumed = False
        """Whether the submissions made before a restart are being delivered."""
        self._making_since: float | None = None
        """When the submission that is being generated was begun; None between submissions."""
        self._seconds_made = 0.0
        """How long the last submission took."""
        self._leaving = False
        self._at_rest = trio.Event()
        """Set once a leaving peer generates nothing any more."""
        self._surveyed: Surveyed | None = None
        self._shown = False
        """Whether the screen of the preflight was shown."""

    async def run(self) -> None:
        """Work until the run is over or the peer is cancelled."""
        settings = self._node.settings
        check_quantised(settings.engine, self._settings.quantise, self._run.manifest.thresholds)
        interpreter = interpreter_for(
            settings.engine, settings.home_path, self._settings.interpreter, self._settings.device
        )
        await self._deliveries.open()
        setup = InferenceSetup(
            engine=settings.engine,
            hardware=self._settings.hardware,
            alter_weights=self._settings.alter_weights,
            environments=self._run.manifest.environments,
            tokens_max=self._run.manifest.sampling.max_new_tokens,
        )
        async with (
            trio.open_nursery() as nursery,
            self._peer.messenger.answering({Verdict: self._deliveries.on_verdict}),
        ):
            nursery.start_soon(self._follow_checkpoints)

            async def live() -> None:
                self._loaded = None
                async with self._node.compute.child(
                    self.service,
                    setup,
                    name="engine",
                    interpreter=interpreter,
                ) as child:
                    engine = client(InferenceService, child)
                    self._surveyed = await engine.survey(Survey())
                    self._equipped.set()
                    try:
                        await self._generate_until_over(engine, nursery)
                    finally:
                        self._making_since = None
                        if self._leaving:
                            self._at_rest.set()

            await self._restarts.run(live)
            nursery.cancel_scope.cancel()

    async def leave(self) -> None:
        """Finish and deliver the submission under way, if that takes at most `leave_seconds`.

        Submissions have a fixed number of groups, so no prefix of one is handed in; what is
        finished of it stays on the disk, and a restart goes on with the rest.
        """
        self._leaving = True
        seconds = self._settings.leave_seconds
        reason = "no submission is being generated"
        if self._making_since is not None and not self._deliveries.is_full:
            spent = self._node.world.now() - self._making_since
            wanted = self._seconds_made - spent
            if wanted <= seconds and seconds:
                self._events.emit("inference.leaving", seconds=seconds, reason="")
                with trio.move_on_after(seconds):
                    await self._at_rest.wait()
                return
            reason = "the submission under way is abandoned"
            if seconds:
                reason += f": it needs about {wanted:.0f} s more, and leave_seconds is {seconds:g}"
        self._events.emit("inference.leaving", seconds=0.0, reason=reason)

    async def _follow_checkpoints(self) -> None:
        await self._equipped.wait()
        await self._peer.policies.follow(POLICIES_IN_MEMORY)

    # --- generating --------------------------------------------------------------------------

    async def _generate_until_over(self, engine: InferenceService, nursery: trio.Nursery) -> None:
        while not self._leaving:
            self._peer.status.doing = (
                f"waiting for {'verdicts' if self._deliveries.is_full else 'work'}"
            )
            async with trio.open_nursery() as waiting:
                waiting.start_soon(complain, self._say_without_work)
                await self._peer.order.wait_until(lambda _: self._wanted())
                waiting.cancel_scope.cancel()
            order = self._peer.step_order()
            assert order is not None
            if order.final:
                self._events.emit("inference.run_over", step=order.step)
                return
            await self._resume(order, nursery)
            self._start_step(order)
            if not self._wanted():
                continue  # all its numbers were made before a restart
            if self._run.manifest_of(order) is None:
                self._peer.status.doing = f"waiting for version {order.run_version} of the run"
                await self._while_wanted(order, partial(self._peer.versions.manifest_of, order))
                continue
            if self._loaded != order.checkpoint:
                await self._load(engine, order)
                continue  # a newer order may have come meanwhile
            await self._make_submission(engine, order, nursery)

    def _wanted(self) -> bool:
        order = self._peer.step_order()
        if order is None:
            return False
        if order.final:
            return True
        number = self._number if self._step == (order.lineage, order.step) else 0
        return (
            order.groups_wanted > 0
            and number < order.submissions_max
            and not self._deliveries.is_full
        )

    def _say_without_work(self, seconds: float) -> None:
        order, manifest = self._peer.step_order(), self._run.manifest
        trainers = [trainer.peer for trainer in manifest.trainers]
        if order is None:
            reason = "no step order has come"
        elif self._deliveries.is_full:
            waiting = self._deliveries.under_way
            reason = f"{waiting} submissions have no verdict yet, the most this run allows"
        elif order.groups_wanted == 0:
            reason = f"step {order.step} wants no more work, and no other is open"
        else:
            reason = f"step {order.step} lets each peer make {order.submissions_max} submissions"
        for_verdicts = order is not None and self._deliveries.is_full
        waits = manifest.validator_ids() if for_verdicts else trainers
        self._peer.say_starved("inference", seconds, reason, waits)

    async def _resume(self, order: StepOrder, nursery: trio.Nursery) -> None:
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
        self._peer.status.doing = "delivering what was made before the restart"
        for made in waiting:  # in the order of their numbers
            await nursery.start(
                self._deliveries.see_through, made.submission, made.nonce, made.path, made.ordered
            )

    def _start_step(self, order: StepOrder) -> None:
        if self._step != (order.lineage, order.step):
            self._step = (order.lineage, order.step)
            self._number = self._deliveries.outbox.next_number(order.lineage, order.step)
        self._peer.status.step = order.step

    def _show_preflight(self, order: StepOrder) -> None:
        """Say once what this peer found, before it fetches a policy."""
        if self._shown or self._surveyed is None:
            return
        self._shown = True
        transport = self._node.transport
        found = preflight.examine(
            self._node.settings,
            self._surveyed,
            self._node.disk.free_bytes(),
            work=preflight.Work(self._run, self._peer.newest_checkpoint(), order),
            line=preflight.Line(list(transport.addresses()), transport.reachability().value),
        )
        self._events.emit(
            "inference.preflight", lines=preflight.lines(found), **preflight.figures(found)
        )

    def _show_ready(self, loaded: Loaded) -> None:
        """Say what the engine can do with the first policy."""
        found = [preflight.room(loaded)]
        names = ", ".join(dict.fromkeys(e.name for e in self._run.manifest.environments))
        renders = "tasks are rendered as the run's owner renders them"
        found.append(preflight.Finding("tasks", f"{names}: {renders}", {"rendered_alike": True}))
        self._events.emit(
            "inference.ready", lines=preflight.lines(found), **preflight.figures(found)
        )

    async def _load(self, engine: InferenceService, order: StepOrder) -> None:
        self._show_preflight(order)
        self._peer.status.doing = f"fetching policy {order.policy}"
        folder = await self._while_wanted(
            order,
            partial(self._peer.policies.get, order.checkpoint),
        )
        if folder is None:
            return
        self._peer.status.doing = f"loading policy {order.policy}"
        key = (order.lineage, order.policy)
        self._peer.store.pin(key)
        try:
            local = str(self._node.disk.local_path(folder))
            loaded = await engine.load(Load(policy=order.checkpoint, folder=local))
        finally:
            self._peer.store.unpin(key)
        if self._loaded is None:
            await self._check_rendering(engine)
            self._show_ready(loaded)
        self._loaded = order.checkpoint
        self._peer.status.policy = order.policy
        self._events.emit("inference.policy_loaded", policy=order.policy, seconds=loaded.seconds)

    async def _while_wanted(
        self, order: StepOrder, fetch: Callable[[], Awaitable[Fetched]]
    ) -> Fetched | None:
        """The result of `fetch`, or None if a newer order makes it useless.

        A newer order does so if it names another policy or another version of the run, or ends the
        run.
        """
        fetched: Fetched | None = None

        def wants(order: StepOrder) -> tuple[int, int, bool, bytes]:
            return order.lineage, order.policy, order.final, order.run_digest

        def superseded() -> bool:
            newest = self._peer.step_order()
            return newest is not None and wants(newest) != wants(order)

        async def give_up() -> None:
            await self._peer.order.wait_until(lambda _: superseded())
            nursery.cancel_scope.cancel()

        def say(seconds: float) -> None:
            here = self._peer.policies.progress(order.checkpoint)
            trainers = [trainer.peer for trainer in self._run.manifest.trainers]
            reason = f"of policy {order.policy}, which step {order.step} uses, {here}"
            if self._run.manifest_of(order) is None:
                reason = f"version {order.run_version} of the run, which step {order.step} follows"
                reason += ", has not come"
            self._peer.say_starved("inference", seconds, reason, trainers)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up)
            nursery.start_soon(complain, say)
            fetched = await fetch()
            nursery.cancel_scope.cancel()
        return fetched

    async def _check_rendering(self, engine: InferenceService) -> None:
        """Raise `UserError` unless this machine renders tasks as the run's owner does."""
        for environment in self._run.manifest.environments:
            probed = await engine.probe(Probe(environment=environment))
            if probed.digest != environment.probe_hash:
                raise UserError(
                    f"this machine renders the tasks of {environment.name} {environment.version} "
                    "differently from the run's owner, so its work would be refused; install the "
                    "version of Swarm that the run uses"
                )

    async def _make_submission(
        self, engine: InferenceService, order: StepOrder, nursery: trio.Nursery
    ) -> None:
        manifest = self._run.manifest_of(order)
        if manifest is None:
            return  # forgotten meanwhile
        ordered = self._peer.order.value  # the envelope of `order`; a newer one may replace it
        number, entry = self._number, self._peer.entry
        self._peer.status.doing = f"generating {number} of step {order.step}"
        path = path_of(order.lineage, order.step, number)
        started = self._making_since = self._node.world.now()
        made = await engine.generate(
            Generate(
                order=SubmissionOrder(
                    run=self._run.id,
                    policy=order.checkpoint,
                    step=order.step,
                    nonce=nonce_of(order.nonce, entry),
                    worker=self._peer.peer_id,
                    number=number,
                    groups=manifest.sampling.groups_per_submission,
                    environments=manifest.environments,
                    sampling=manifest.sampling,
                ),
                path=str(self._node.disk.local_path(path)),
            )
        )
        seconds = self._seconds_made = self._node.world.now() - started
        self._peer.status.tokens_per_second = made.tokens / max(seconds, 1e-6)
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
            entry=entry,
        )
        await self._deliveries.outbox.keep(Made(submission, order.nonce, path, ordered))
        self._number = number + 1
        self._restarts.succeeded()
        self._events.emit(
            "inference.submission_made",
            step=order.step,
            policy=order.policy,
            number=number,
            tokens=made.tokens,
            seconds=seconds,
        )
        self._peer.status.doing = f"delivering {number} of step {order.step}"
        await nursery.start(self._deliveries.see_through, submission, order.nonce, path, ordered)
        self._making_since = None
