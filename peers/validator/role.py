"""The validator role: receive submissions, check them, sign verdicts.

A submission is pushed, then announced; the acknowledgement says that the file is here, durably.
Two child processes check it: one without torch parses the hostile file and rebuilds prompts and
rewards, one with torch recomputes activations and sampling. The verdict is durable, in the log,
before anybody hears of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import msgspec
import trio

from peers.validator.inbox import Inbox, Key, path_of
from peers.validator.statistics import Duplicates, Pace, WorkerRecord, prefill_wanted
from swarm import defaults
from swarm.envelope import Envelope, open_envelope
from swarm.errors import PeerError
from swarm.events import Rationed
from swarm.gossip.topics import RUN, WORK
from swarm.identity import PeerId
from swarm.jobs import (
    Inspect,
    InspectionClient,
    InspectionService,
    Judge,
    Load,
    PrefillClient,
    PrefillService,
    Report,
    SubmissionOrder,
)
from swarm.messages import (
    Acknowledgement,
    Admission,
    AdmissionRefused,
    Check,
    Checkpoint,
    CheckpointReference,
    RunManifest,
    StepOrder,
    Submission,
    Verdict,
)
from swarm.messenger import first
from swarm.node.run_node import RunNode
from swarm.observable import Observable, complain
from swarm.run.admission import check_admission
from swarm.run.manifest import manifest_in
from swarm.world import ChildDied, ChildError
from swarm.world.restarts import Restarts

ORDER_WAIT_SECONDS = 3.0
"""A worker may hear of a new step a moment before this validator does."""

TURN_VALIDATORS_MAX = 3
"""Submission n waits for the verdict on n - 1 as long as this many validators may be silent in a
row, each until the worker turns to the next."""

DEATHS_PER_CASE_MAX = 2
"""A submission over which so many children died is quarantined: a file that kills its reader would
else keep everybody else's waiting."""

UNGRADED_PAUSE_SECONDS = 60.0
"""A validator whose environment fails takes no work for this long, then tries once more."""

TURNED_DOWN_KEPT = 1024

VERDICTS_RECOVERED_MAX = 8192
"""Own verdicts read again at a start: those on steps still open are among the newest, and a start
takes no longer the older the run is."""

ORDERS_KEPT = 64
SAID_PEERS_MAX = 8
"""Workers named when none of them hands anything in."""
INSPECTOR_MEMORY_BYTES = 2 << 30
POLICIES_IN_MEMORY = 2
"""The one in use, and the one before it or the next."""

TIDY_SECONDS = 15.0


Place = tuple[str, int, int, int]
"""(worker, lineage, step, number)."""


@dataclass(frozen=True)
class _Case:
    """A submission to be judged."""

    announced: Envelope
    submission: Submission
    worker: str
    order: StepOrder

    @property
    def key(self) -> Key:
        return (self.worker, self.submission.digest)

    @property
    def place(self) -> Place:
        return _place(self.worker, self.submission)


@dataclass
class _Outcome:
    """What the checks came to."""

    checks: list[Check]
    failed: str = ""
    detail: str = ""
    proven_fault: bool = False
    quarantined: bool = False
    rewards: list[list[float]] | None = None
    task_means: list[float] = field(default_factory=list)
    task_spreads: list[float] = field(default_factory=list)
    environments: list[int] = field(default_factory=list)
    """Index of each group's environment."""

    @property
    def word(self) -> Literal["accepted", "refused", "quarantined"]:
        """As the verdict states it."""
        if not self.failed:
            return "accepted"
        return "quarantined" if self.quarantined else "refused"


class ValidatorRole:
    """Judges submissions. Must run on a peer whose key the manifest names as a validator."""

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._node = peer.node
        self._run = peer.run
        self._events = peer.node.events
        self._disk = peer.node.disk
        self._trusted = peer.trusted_part("validator")
        self._database = self._disk.database("validator.sqlite")
        self._secret = self._node.world.secret_bytes(32)
        self._orders: dict[tuple[int, int], StepOrder] = {}
        self._inbox = Inbox(
            peer.run,
            peer.node.disk,
            peer.node.world,
            judged=lambda key: self._verdict_on(key) is not None,
        )
        self._answering: dict[Key, trio.Event] = {}
        """Announcements that are being looked at, and when they no longer are."""
        self._waiting: dict[Key, _Case] = {}
        self._places: dict[Place, bytes] = {}
        """Which submission stands where."""
        self._judged: dict[Key, Envelope] = {}
        self._turned_down: OrderedDict[Key, Envelope] = OrderedDict()
        """The last announcements that were refused as such, so that each gets one answer."""
        self._denials = Rationed(self._events)
        self._strangers = Rationed(self._events)
        self._accepted_elsewhere: dict[Key, Envelope] = {}
        """Verdicts of other validators, which are as good as an own one: the trainer takes the
        first. (A refusal or quarantine may have a reason that does not hold here.)"""
        self._judged_places: set[Place] = set()
        self._progress = Observable(None)
        """Changes with `_orders`, `_judged_places` and `_accepted_elsewhere`."""
        self._records: dict[str, WorkerRecord] = {}
        self._paces: dict[str, Pace] = {}
        self._duplicates = Duplicates()
        self._ungraded = 0
        """Honest submissions in a row that the environment could not grade."""
        self._queue, self._cases = trio.open_memory_channel[_Case](10_000)
        self._nursery: trio.Nursery
        """While requests are answered."""
        self._in_hand: _Case | None = None
        """What is judged now: once more, when a child died over it."""
        self._deaths_in_hand = 0
        self._equipped = trio.Event()
        """The children have found engine and environment: a policy is worth fetching."""
        self._inspector_restarts = Restarts(self._events, "inspector")
        self._prefill_restarts = Restarts(self._events, "prefill")
        self._loaded: list[CheckpointReference] = []
        """Policies that the prefill child holds."""
        peer.gossip.listen(StepOrder, self._on_order)
        peer.gossip.listen(Verdict, self._on_verdict)

    async def run(self) -> None:
        """Judge until cancelled."""
        await self._recover()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._follow_checkpoints)
            nursery.start_soon(self._inbox.run)
            nursery.start_soon(self._tidy)
            for case in list(self._waiting.values()):
                nursery.start_soon(self._queue_in_turn, case)
            self._peer.status.doing = "ready to judge"
            async with self._peer.messenger.answering({Submission: self._on_submission}):
                # Not before: what nobody can announce yet would only take up its worker's quota.
                self._peer.pushes.policy = self._inbox
                try:
                    await self._prefill_restarts.run(self._live)
                finally:
                    self._peer.pushes.policy = None

    async def _follow_checkpoints(self) -> None:
        await self._equipped.wait()
        await self._peer.policies.follow(POLICIES_IN_MEMORY)

    async def _live(self) -> None:
        """Judge for as long as the prefill child lives, which may take long to load a policy;
        the inspector, which hostile files may kill, is started again beside it."""
        self._loaded = []
        async with self._node.compute.child(
            "peers.validator.prefill:PrefillService",
            name="prefill",
            arguments={
                "policies_kept": POLICIES_IN_MEMORY,
                "engine": self._node.settings.engine,
            },
        ) as prefill:

            async def live() -> None:
                async with self._node.compute.child(
                    "peers.validator.inspector:InspectorService",
                    name="inspector",
                    arguments={
                        "environments": self._run.manifest.environments,
                    },
                    memory_limit_bytes=INSPECTOR_MEMORY_BYTES,
                ) as inspector:
                    self._equipped.set()
                    await self._judge_in_turn(InspectionClient(inspector), PrefillClient(prefill))

            await self._inspector_restarts.run(live)

    async def _judge_in_turn(self, inspector: InspectionService, prefill: PrefillService) -> None:
        while True:
            case = self._in_hand = self._in_hand or await self._next_case()
            elsewhere = self._accepted_elsewhere.get(case.key)
            if elsewhere is not None:
                await self._leave(case, PeerId(elsewhere.sender))
            else:
                self._peer.status.doing = f"judging step {case.submission.step}"
                self._note_grading(await self._judge(case, inspector, prefill))
            self._put_down()

    def _note_grading(self, outcome: _Outcome) -> None:
        """Once too many submissions in a row could not be graded, take no more for a while."""
        self._peer.status.doing = "ready to judge"
        if outcome.failed == "environment":
            self._ungraded += 1
            if self._ungraded >= defaults.UNGRADED_MAX:
                self._turn_away(outcome.detail)
        elif outcome.word == "accepted":
            self._ungraded = 0

    def _turn_away(self, reason: str) -> None:
        """Take no pushes for a while: what this validator cannot grade, another one may."""
        self._peer.status.doing = f"cannot grade: {reason}"[:200]
        if self._peer.pushes.policy is None:  # what was here already is judged all the same
            return
        self._events.emit(
            "validator.cannot_grade",
            submissions=self._ungraded,
            reason=reason,
            seconds=UNGRADED_PAUSE_SECONDS,
        )
        self._peer.pushes.policy = None

        async def try_again() -> None:
            await trio.sleep(UNGRADED_PAUSE_SECONDS)
            self._peer.pushes.policy = self._inbox

        self._nursery.start_soon(try_again)

    async def _next_case(self) -> _Case:
        async with trio.open_nursery() as waiting:
            waiting.start_soon(complain, self._say_without_work)
            case = await self._cases.receive()
            waiting.cancel_scope.cancel()
        return case

    def _say_without_work(self, seconds: float) -> None:
        order = self._peer.step_order()
        if order is None:
            trainers = [trainer.peer for trainer in self._run.manifest.trainers]
            self._peer.say_starved("validator", seconds, "no step order has come", trainers)
        elif order.groups_wanted > 0 and not self._waiting:
            workers = self._trusted.registrar.live_workers()
            there = "" if workers else ", and no inference peer is there"
            reason = f"step {order.step} wants {order.groups_wanted} groups, none comes{there}"
            self._peer.say_starved("validator", seconds, reason, workers[:SAID_PEERS_MAX])

    def _put_down(self) -> None:
        """The case in hand is settled."""
        self._in_hand, self._deaths_in_hand = None, 0

    # --- receiving ---------------------------------------------------------------------------

    async def _on_submission(
        self, envelope: Envelope, supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        assert isinstance(envelope.message, Submission)
        key = (envelope.sender, envelope.message.digest)
        self._take_receipt(envelope.sender, first(supporting, Verdict))
        while key in self._answering:  # asked again before it was answered: one verdict each
            await self._answering[key].wait()
        known = self._verdict_on(key) or self._turned_down.get(key)
        if known is not None:
            if key not in self._judged and key not in self._waiting:
                await self._inbox.remove(key)
            return [known]
        if key in self._waiting:
            return [await self._acknowledge(self._waiting[key])]
        self._answering[key] = trio.Event()
        try:
            return await self._take_up(envelope, supporting)
        finally:
            self._answering.pop(key).set()

    def _verdict_on(self, key: Key) -> Envelope | None:
        """The verdict that was given here, or else one by which another validator accepted it."""
        return self._judged.get(key) or self._accepted_elsewhere.get(key)

    async def _turn_down(self, worker: str, submission: Submission, outcome: _Outcome) -> Envelope:
        """Refuse an announcement, for its worker's ears only. It cost nothing to make, so that
        nothing comes of it for others: no entry in the log, no word to the trainer."""
        verdict = _verdict(worker, submission, outcome, log_index=-1)
        envelope = await self._peer.seal(verdict, defaults.VERDICT_LIFETIME_SECONDS)
        self._turned_down[worker, submission.digest] = envelope
        if len(self._turned_down) > TURNED_DOWN_KEPT:
            self._turned_down.popitem(last=False)
        self._denials.emit(
            "validator.turned_down",
            submission=submission.digest,
            worker=worker,
            step=submission.step,
            number=submission.number,
            failed=outcome.failed,
            reason=outcome.detail,
        )
        return envelope

    async def _take_up(
        self, envelope: Envelope, supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        """Acknowledge what is announced for the first time, or refuse it."""
        submission = envelope.message
        assert isinstance(submission, Submission)
        key = (envelope.sender, submission.digest)
        order = await self._order_of(submission, first(supporting, StepOrder))
        manifest = self._run.manifest if order is None else self._run.manifest_of(order)
        if manifest is None:
            return []  # not by another version than its step's: the worker asks again
        refusal = self._refusal(envelope, submission, supporting, order, manifest)
        if refusal is not None:
            check, figure, threshold, detail = refusal
            if check == "admission":  # a stranger gets no entry in the log, whatever he sends
                self._strangers.emit(
                    "validator.not_admitted", remote=envelope.sender, reason=detail
                )
                word = AdmissionRefused(peer=envelope.sender, reason=detail[:500])
                return [await self._peer.seal(word, defaults.ENVELOPE_LIFETIME_SECONDS)]
            await self._inbox.remove(key)
            if order is not None and submission.number < order.submissions_max:
                place = _place(envelope.sender, submission)
                self._places.setdefault(place, submission.digest)
                self._judged_places.add(place)
                self._progress.touch()
            outcome = _Outcome(
                [Check(name=check, figure=figure, threshold=threshold, passed=False)], check, detail
            )
            return [await self._turn_down(envelope.sender, submission, outcome)]
        assert order is not None
        case = _Case(envelope, submission, envelope.sender, order)
        self._waiting[key] = case
        self._places[case.place] = submission.digest
        self._inbox.hold(key, submission.size_bytes)
        await self._database.transact(
            lambda connection: connection.execute(
                "INSERT OR REPLACE INTO unjudged (worker, digest, announced, arranged) "
                "VALUES (?, ?, ?, ?)",
                (*key, envelope.raw, msgspec.msgpack.encode(order)),
            )
        )
        self._nursery.start_soon(self._queue_in_turn, case)
        return [await self._acknowledge(case)]

    async def _acknowledge(self, case: _Case) -> Envelope:
        return await self._peer.announce(
            Acknowledgement(
                submission=case.submission.digest,
                worker=case.worker,
                lineage=case.submission.lineage,
                groups=case.submission.groups,
            ),
            defaults.ENVELOPE_LIFETIME_SECONDS,
        )

    async def _order_of(self, submission: Submission, shown: Envelope | None) -> StepOrder | None:
        """The order of a submission's step. The worker shows the one it followed: a validator
        that was away when the trainer gave it would never hear of it otherwise."""
        key = (submission.lineage, submission.step)
        if shown is not None and self._is_believed(shown):
            self._on_order(shown)
        with trio.move_on_after(ORDER_WAIT_SECONDS):
            await self._progress.wait_until(lambda _: key in self._orders)
            await self._peer.versions.manifest_of(self._orders[key])
        return self._orders.get(key)

    def _take_receipt(self, worker: str, shown: Envelope | None) -> None:
        """Likewise the verdict on the number before, by a validator that this one may not hear.
        One that stands in no log was for its worker's ears only."""
        if shown is not None and self._is_believed(shown):
            verdict = shown.message
            assert isinstance(verdict, Verdict)
            if verdict.worker == worker and verdict.log_index >= 0:
                self._on_verdict(shown)

    def _is_believed(self, shown: Envelope) -> bool:
        """Whether its sender may say in this run what somebody else shows of it."""
        return (
            shown.body.run == self._run.id
            and self._run.permits(shown.sender, shown.message) is None
        )

    def _refusal(
        self,
        envelope: Envelope,
        submission: Submission,
        supporting: Sequence[Envelope],
        order: StepOrder | None,
        manifest: RunManifest,
    ) -> tuple[str, float, float, str] | None:
        """Check 1: announcement, admission, step, version, policy, number, file. (check, figure,
        threshold, detail) of the first that fails. `manifest`: the one that the step follows."""
        worker = envelope.sender
        admission = first(supporting, Admission)
        if worker not in self._run.manifest.trusted_ids():
            problem = (
                "none was shown"
                if admission is None
                else check_admission(admission, self._run, worker, self._node.world.wall_time())
            )
            if problem is not None:
                return "admission", 0, 1, f"no valid admission: {problem}"
        if order is None:
            return "step", submission.step, 0, "no such step is known"
        newest = self._peer.step_order()
        oldest = max(0, (newest.step if newest else 0) - manifest.schedule.max_staleness)
        if submission.step < oldest:
            return "step", submission.step, oldest, "that step is too old to be trained on"
        if submission.run_digest != order.run_digest:
            made_under = self._run.version(submission.run_digest)
            return (
                "version",
                manifest_in(made_under).version if made_under else 0,
                order.run_version,
                "the step order names another version of the run",
            )
        if submission.policy != order.policy:
            return "policy", submission.policy, order.policy, "the step order names another policy"
        if submission.number >= order.submissions_max:
            return (
                "number",
                submission.number,
                order.submissions_max - 1,
                "more submissions than the step order allows one worker",
            )
        if submission.groups > manifest.sampling.groups_per_submission:
            return (
                "groups",
                submission.groups,
                manifest.sampling.groups_per_submission,
                "more groups than the manifest allows in a submission",
            )
        place = _place(worker, submission)
        if self._places.get(place, submission.digest) != submission.digest:
            return "number", submission.number, 1, "another file was delivered under this number"
        size_bytes = self._inbox.size_bytes((worker, submission.digest))
        if size_bytes is None:
            return "file", 0, 1, "the file was not pushed before it was announced"
        if size_bytes != submission.size_bytes:
            return (
                "size",
                submission.size_bytes,
                size_bytes,
                "the announced size is not the file's",
            )
        return None

    async def _queue_in_turn(self, case: _Case) -> None:
        """Submission n is judged after n - 1 was: nobody may skip a number he dislikes."""
        worker, lineage, step, number = case.place
        before = (worker, lineage, step, number - 1)

        def may_go_on() -> bool:
            return before in self._judged_places or case.key in self._accepted_elsewhere

        if number > 0:
            limits = self._run.manifest.limits
            patience = (limits.acknowledgement_seconds + limits.verdict_seconds) * min(
                TURN_VALIDATORS_MAX, len(self._run.manifest.validator_ids())
            )
            arrived = True
            while not may_go_on() and arrived:
                # One that waits for its own verdict here is only late, however long it takes.
                arrived = (worker, self._places.get(before)) in self._waiting
                with trio.move_on_after(patience) as waited:
                    await self._progress.wait_until(lambda _: may_go_on())
                arrived = arrived or not waited.cancelled_caught
            if not may_go_on():
                outcome = _Outcome(
                    [Check(name="number", figure=number, threshold=number - 1, passed=False)],
                    "number",
                    f"submission {number - 1} of this step was never delivered",
                )
                await self._conclude(case.announced, case.submission, outcome, seconds=0.0)
                return
        await self._queue.send(case)

    # --- judging -----------------------------------------------------------------------------

    async def _judge(
        self, case: _Case, inspector: InspectionService, prefill: PrefillService
    ) -> _Outcome:
        started = self._node.world.now()
        try:
            outcome = await self._check(case, inspector, prefill)
        except ChildDied as error:
            self._deaths_in_hand += not error.between_calls
            if self._deaths_in_hand >= DEATHS_PER_CASE_MAX:
                detail = f"its check ended {self._deaths_in_hand} children here: {error}"
                outcome = _Outcome([], "internal", detail, quarantined=True)
                await self._conclude(case.announced, case.submission, outcome, seconds=0.0)
                self._put_down()
                self._inspector_restarts.succeeded()  # the file is to blame, not this machine
            raise
        except ChildError as error:
            outcome = _Outcome([], "internal", f"the check failed here: {error}", quarantined=True)
        except PeerError as error:
            outcome = _Outcome([], "internal", f"nothing to check with: {error}", quarantined=True)
        seconds = self._node.world.now() - started
        await self._conclude(case.announced, case.submission, outcome, seconds=seconds)
        return outcome

    async def _check(
        self, case: _Case, inspector: InspectionService, prefill: PrefillService
    ) -> _Outcome:
        submission, order = case.submission, case.order
        evicted = self._refused_as_evicted(case.worker)
        if evicted is not None:
            return evicted
        with trio.move_on_after(self._run.manifest.limits.verdict_seconds):
            await self._peer.versions.manifest_of(order)
        manifest = self._run.manifest_of(order)
        if manifest is None:
            raise PeerError(f"nobody has version {order.run_version} of the run")
        newest = self._peer.newest_checkpoint()
        age = newest.step - submission.policy if newest is not None else 0
        if age > manifest.schedule.max_staleness:
            oldest = manifest.schedule.max_staleness
            return _Outcome(
                [Check(name="stale", figure=age, threshold=oldest, passed=False)],
                "stale",
                "its policy is too old to be trained on",
            )
        folder = await self._peer.policies.fetch(
            order.lineage,
            order.policy,
            order.manifest_digest,
            order.manifest_bytes,
            deadline_seconds=manifest.limits.verdict_seconds,
        )
        canonical = path_of(case.key) + ".canonical"
        local = self._disk.local_path
        try:
            ordered = self._submission_order(case, manifest)
            inspected = await inspector.inspect(
                Inspect(
                    order=ordered,
                    path=str(local(path_of(case.key))),
                    digest=submission.digest,
                    canonical_path=str(local(canonical)),
                    tokenizer_folder=str(local(folder)),
                    bytes_max=manifest.limits.submission_bytes_max,
                )
            )
            self._inspector_restarts.succeeded()
            outcome = _outcome(inspected)
            outcome.rewards = inspected.rewards
            outcome.task_means = inspected.task_means
            outcome.task_spreads = inspected.task_spreads
            outcome.environments = inspected.environments
            if outcome.failed:
                return outcome
            copied = self._duplicates.seen(inspected.group_digests, case.worker)
            outcome.checks.append(
                Check(name="duplicates", figure=copied, threshold=0, passed=copied == 0)
            )
            if copied:
                outcome.failed = "duplicates"
                outcome.detail = f"{copied} groups are copies of another submission's"
                return outcome
            pace = self._paces.setdefault(case.worker, Pace())
            tokens_per_second = pace.observe(inspected.tokens, self._node.world.now())
            fastest = defaults.WORKER_TOKENS_PER_SECOND_MAX
            outcome.checks.append(
                Check(
                    name="speed",
                    figure=tokens_per_second,
                    threshold=fastest,
                    passed=tokens_per_second <= fastest,
                )
            )
            if tokens_per_second > fastest:
                outcome.failed, outcome.quarantined = "speed", True
                outcome.detail = "more tokens a second than any one machine generates"
                return outcome
            record = self._record(case.worker)
            share = (
                manifest.thresholds.prefill_share_proven
                if record.accepted >= manifest.thresholds.proven_after
                else manifest.thresholds.prefill_share_new
            )
            ungraded = inspected.ungraded
            if ungraded or prefill_wanted(self._secret, submission.digest, share):
                digest = inspected.canonical_digest
                await self._recompute(case, manifest, folder, (canonical, digest), prefill, outcome)
            if ungraded and not outcome.failed:
                # The seed gave these very tokens: no worker can choose text that is not graded.
                outcome.failed, outcome.detail, outcome.quarantined = "environment", ungraded, True
            return outcome
        finally:
            await self._disk.remove(canonical)

    async def _recompute(
        self,
        case: _Case,
        manifest: RunManifest,
        folder: str,
        canonical: tuple[str, bytes],
        prefill: PrefillService,
        outcome: _Outcome,
    ) -> None:
        """Checks 6 and 7, added to `outcome`. `canonical`: path and digest."""
        submission, ordered = case.submission, self._submission_order(case, manifest)
        policy = (submission.lineage, submission.policy)
        if ordered.policy not in self._loaded:
            self._peer.store.pin(policy)
            try:
                local = str(self._disk.local_path(folder))
                loaded = await prefill.load(Load(policy=ordered.policy, folder=local))
            finally:
                self._peer.store.unpin(policy)
            self._loaded = loaded.policies
        judged = await prefill.judge(
            Judge(
                order=ordered,
                path=str(self._disk.local_path(canonical[0])),
                digest=canonical[1],
                thresholds=manifest.thresholds,
            )
        )
        self._prefill_restarts.succeeded()
        found = _outcome(judged)
        outcome.checks.extend(found.checks)
        outcome.failed, outcome.detail = found.failed, found.detail
        self._record(case.worker).observe(judged.mismatches, judged.positions, manifest.thresholds)

    def _submission_order(self, case: _Case, manifest: RunManifest) -> SubmissionOrder:
        return SubmissionOrder(
            run=self._run.id,
            policy=case.order.checkpoint,
            step=case.submission.step,
            nonce=case.order.nonce,
            worker=case.worker,
            number=case.submission.number,
            groups=case.submission.groups,
            environments=manifest.environments,
            sampling=manifest.sampling,
        )

    def _record(self, worker: str) -> WorkerRecord:
        return self._records.setdefault(worker, WorkerRecord())

    # --- verdicts ----------------------------------------------------------------------------

    async def _conclude(
        self, announced: Envelope, submission: Submission, outcome: _Outcome, *, seconds: float
    ) -> Envelope:
        """Make the verdict durable, then publish it and tell the worker."""
        worker = announced.sender
        key = (worker, submission.digest)
        digest = submission.digest
        decided = 0.0

        def verdict_at(log_index: int) -> Verdict:
            nonlocal outcome, decided
            # It may have been put out while this was judged, or waited for its turn in the log.
            if not outcome.failed:
                outcome = self._refused_as_evicted(worker) or outcome
            decided = self._node.world.now()
            return _verdict(worker, submission, outcome, log_index)

        envelope = await self._trusted.append_verdict(verdict_at)
        self._judged[key] = envelope
        self._waiting.pop(key, None)
        self._inbox.let_go(key)
        await self._forget_unjudged(key)
        if outcome.word == "accepted":
            # With this hash it is the only one: the file's header names its worker.
            self._peer.blobs.register(digest, path_of(key), 0, submission.size_bytes)
            self._record(worker).accepted += 1
        else:
            self._record(worker).accepted = 0  # looked at closely again
            await self._inbox.remove(key)
        self._peer.gossip.publish(envelope)
        self._judged_places.add(_place(worker, submission))
        self._progress.touch()
        failed = next((check for check in outcome.checks if not check.passed), None)
        self._events.emit(
            "validator.verdict",
            submission=digest,
            worker=worker,
            outcome=outcome.word,
            failed=outcome.failed,
            figure=failed.figure if failed else 0.0,
            threshold=failed.threshold if failed else 0.0,
            detail=outcome.detail,
            step=submission.step,
            policy=submission.policy,
            number=submission.number,
            seconds=seconds,
            written_seconds=self._node.world.now() - decided,
        )
        self._nursery.start_soon(self._tell_worker, PeerId(worker), envelope)
        await self._maybe_evict(worker, digest, outcome)
        return envelope

    def _refused_as_evicted(self, worker: str) -> _Outcome | None:
        """What becomes of a submission whose worker is out of the run; None if he is not."""
        eviction = self._run.evicted(worker)
        if eviction is None:
            return None
        return _Outcome(
            [Check(name="admission", figure=0, threshold=1, passed=False)],
            "admission",
            f"its worker was evicted: {eviction.reason}",
        )

    async def _tell_worker(self, worker: PeerId, envelope: Envelope) -> None:
        try:
            await self._peer.messenger.request(worker, envelope)
        except PeerError as error:
            self._events.emit("validator.receipt_undelivered", worker=worker, reason=str(error))

    async def _maybe_evict(self, worker: str, digest: bytes, outcome: _Outcome) -> None:
        """Evict for a proven fault, or when honest chance no longer explains a worker."""
        record = self._record(worker)
        thresholds = record.thresholds
        if self._run.evicted(worker) is not None:
            return
        if outcome.proven_fault:
            await self._trusted.evict(worker, f"proven fault: {outcome.detail}", digest, 1.0, 0.0)
            return
        p_value = record.p_value(thresholds.honest_mismatch_rate)
        if p_value < thresholds.eviction_p_value:
            await self._trusted.evict(
                worker,
                f"sampled tokens that the policy would not: p = {p_value:.1e}, "
                f"threshold {thresholds.eviction_p_value:.0e}",
                digest,
                p_value,
                thresholds.eviction_p_value,
            )

    # --- what others say ---------------------------------------------------------------------

    def _on_order(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, StepOrder)
        self._take_order(envelope.message)

    def _take_order(self, order: StepOrder) -> None:
        key = (order.lineage, order.step)
        held = self._orders.get(key)
        if held is None or held.order() < order.order():
            self._orders[key] = order
            while len(self._orders) > ORDERS_KEPT:
                del self._orders[min(self._orders)]
            self._progress.touch()

    def _on_verdict(self, envelope: Envelope) -> None:
        verdict = envelope.message
        assert isinstance(verdict, Verdict)
        place = _place(verdict.worker, verdict)
        self._judged_places.add(place)
        self._places.setdefault(place, verdict.submission)
        if envelope.sender != self._peer.peer_id and verdict.outcome == "accepted":
            self._accepted_elsewhere[verdict.worker, verdict.submission] = envelope
        self._progress.touch()

    async def _leave(self, case: _Case, quicker: PeerId) -> None:
        """Leave a case to the validator that was quicker. A worker turns to the next in rank when
        a verdict is late; were both to judge it then, one's overload would become everybody's."""
        self._waiting.pop(case.key, None)
        await self._forget_unjudged(case.key)
        await self._inbox.remove(case.key)
        self._events.emit(
            "validator.accepted_elsewhere",
            submission=case.submission.digest,
            worker=case.worker,
            step=case.submission.step,
            number=case.submission.number,
            by=quicker,
        )

    # --- upkeep ------------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Take up what was acknowledged before a restart, and serve what was accepted."""
        await self._database.transact(
            lambda connection: connection.execute(
                "CREATE TABLE IF NOT EXISTS unjudged "
                "(worker TEXT NOT NULL, digest BLOB NOT NULL, announced BLOB NOT NULL, "
                "arranged BLOB NOT NULL, PRIMARY KEY (worker, digest))"
            )
        )
        for envelope in self._trusted.verdicts(VERDICTS_RECOVERED_MAX):
            verdict = envelope.message
            assert isinstance(verdict, Verdict)
            key = (verdict.worker, verdict.submission)
            self._judged[key] = envelope
            place = _place(verdict.worker, verdict)
            self._judged_places.add(place)
            self._places[place] = verdict.submission
            if verdict.outcome == "accepted":
                self._record(verdict.worker).accepted += 1
                if self._disk.exists(path_of(key)):
                    self._peer.blobs.register(
                        verdict.submission, path_of(key), 0, verdict.size_bytes
                    )
                    await self._say_again(envelope, verdict)
        for announced, arranged in self._database.read(
            "SELECT announced, arranged FROM unjudged ORDER BY worker, digest"
        ):
            envelope = open_envelope(announced)
            order = msgspec.msgpack.decode(arranged, type=StepOrder)
            assert isinstance(envelope.message, Submission)
            case = _Case(envelope, envelope.message, envelope.sender, order)
            if not self._disk.exists(path_of(case.key)):
                continue
            self._waiting[case.key] = case
            self._places[case.place] = case.submission.digest
            self._inbox.hold(case.key, case.submission.size_bytes)
            self._take_order(order)
        await self._inbox.remove_others({*self._waiting, *self._judged})

    async def _say_again(self, envelope: Envelope, verdict: Verdict) -> None:
        """Announce a verdict whose file is still here; signed anew if its envelope has expired."""
        if envelope.body.expires_ms > self._node.world.wall_time() * 1000:
            self._peer.gossip.publish(envelope)
        else:
            await self._peer.announce(verdict, defaults.VERDICT_LIFETIME_SECONDS)

    async def _tidy(self) -> None:
        """Forget what can no longer be trained on."""
        while True:
            await trio.sleep(TIDY_SECONDS)
            newest = self._peer.newest_checkpoint()
            if newest is not None:
                await self._forget_older(newest)

    async def _forget_unjudged(self, key: Key) -> None:
        await self._database.transact(
            lambda connection: connection.execute(
                "DELETE FROM unjudged WHERE worker = ? AND digest = ?", key
            )
        )

    async def _forget_older(self, newest: Checkpoint) -> None:
        oldest = newest.step - self._run.max_staleness - 2

        def is_old(envelope: Envelope) -> bool:
            verdict = envelope.message
            assert isinstance(verdict, Verdict)
            return verdict.lineage < newest.lineage or verdict.step < oldest

        for key, envelope in list(self._judged.items()):
            verdict = envelope.message
            assert isinstance(verdict, Verdict)
            if is_old(envelope):
                if verdict.outcome == "accepted":
                    self._peer.blobs.unregister(verdict.submission)
                await self._inbox.remove(key)
                del self._judged[key]
        for key in [k for k, envelope in self._accepted_elsewhere.items() if is_old(envelope)]:
            del self._accepted_elsewhere[key]
        stale = [p for p in self._places if p[1] < newest.lineage or p[2] < oldest]
        for place in stale:
            del self._places[place]
        self._judged_places = {
            p for p in self._judged_places if p[1] == newest.lineage and p[2] >= oldest
        }


def _place(worker: str, named: Submission | Verdict) -> Place:
    return (worker, named.lineage, named.step, named.number)


def _verdict(worker: str, submission: Submission, outcome: _Outcome, log_index: int) -> Verdict:
    refused = outcome.word == "refused"
    return Verdict(
        submission=submission.digest,
        size_bytes=submission.size_bytes,
        worker=worker,
        lineage=submission.lineage,
        step=submission.step,
        policy=submission.policy,
        number=submission.number,
        outcome=outcome.word,
        failed=outcome.failed,
        detail=outcome.detail[:500],
        proven_fault=outcome.proven_fault,
        checks=outcome.checks,
        rewards=[] if refused else outcome.rewards or [],
        log_index=log_index,
        task_means=[] if refused else outcome.task_means,
        task_spreads=[] if refused else outcome.task_spreads,
        environments=[] if refused else outcome.environments,
    )


def _outcome(report: Report) -> _Outcome:
    """A child's report as an outcome."""
    return _Outcome(
        checks=list(report.checks),
        failed=report.failed,
        detail=report.detail,
        proven_fault=report.proven_fault,
        quarantined=report.quarantined,
    )
