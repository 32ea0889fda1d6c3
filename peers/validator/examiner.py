"""The examiner: runs the checks of a submission, some of them in child processes."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import trio

from peers.validator.cases import Case, Outcome, quarantine_ungraded
from peers.validator.checks.base import first_failure, run
from peers.validator.checks.history import (
    PACES_MAX,
    Duplicates,
    History,
    Pace,
    Record,
    rising,
    speed,
)
from peers.validator.checks.standing import published, staleness
from peers.validator.draws import draw_secret, prefill_wanted, rows_sampled
from peers.validator.eviction import Records
from peers.validator.grades import ServedGrades
from peers.validator.inbox import canonical_path_of, path_of
from peers.validator.queue import CaseQueue
from swarm.errors import PeerError
from swarm.jobs import Load, SubmissionOrder
from swarm.jobs.validation import Grade, Inspect, InspectionService, Judge, Judged, PrefillService
from swarm.ledger.record import share_to_recompute
from swarm.node.run_node import RunNode
from swarm.rollouts.continuations import State
from swarm.rollouts.seeds import digest
from swarm.run.work import submission_order
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import CheckpointReference, Verdict
from swarm.world import ChildDied, ChildError
from swarm.world.recent import Recent
from swarm.world.restarts import Restarts

ROWS_SAMPLED = 4
"""Rows of every submission that are recomputed before its environment's code runs over it ..."""
ROWS_SAMPLED_PROVEN = 1
"""... and of a worker whose stake a refusal would cost. One row shows a file without a model."""


UNRELATED = 0.5
"""Mean error of the sampled rows' proofs, or mean of their min(margin, 1), from which they are most
probably a fake: the roughest engine that was measured, int4, has 0.38 and 0.33. In a run that
observes, where nothing else is known, it decides only when a submission is graded, and how long."""
DOUBTED_SHARE = 1 / 60
"""Of `limits.grading_seconds`: what is spent on grading such a submission."""


class PutDown(Exception):
    """A submission is most probably a fake, and others need the lane."""


class Children(NamedTuple):
    """The services in the validator's child processes."""

    inspector: InspectionService
    prefill: PrefillService
    restarts: Restarts
    """The inspector's."""


class Examiner:
    """Runs the checks of a case, for all lanes."""

    def __init__(
        self, peer: RunNode, records: Records, queue: CaseQueue, prefill_restarts: Restarts
    ) -> None:
        self._peer = peer
        self._queue = queue
        self._run = peer.run
        self._disk = peer.node.disk
        self._secret = draw_secret(peer)
        self._records = records
        self._paces: Recent[str, Pace] = Recent(PACES_MAX)
        self._duplicates = Duplicates()
        self._prefill_restarts = prefill_restarts
        self._loaded: list[CheckpointReference] = []
        """Policies that the prefill child holds."""
        self._turn = trio.Lock()
        """Held while the prefill child is used."""
        self._grades = ServedGrades(peer)

    def is_drawn_later(self, submission: bytes) -> bool:
        """Whether an accepted submission that was not recomputed is drawn for an audit."""
        secret = digest("swarm/1/audits", self._secret)
        return prefill_wanted(secret, submission, self._run.manifest.thresholds.audit_share)

    def is_current(self, case: Case) -> bool:
        """Whether the prefill child holds a case's policy, or none as new."""
        policy = case.order.checkpoint
        newest = max(((held.lineage, held.step) for held in self._loaded), default=(0, 0))
        return policy in self._loaded or (policy.lineage, policy.step) >= newest

    async def audit(self, case: Case, verdict: Verdict, prefill: PrefillService) -> Outcome:
        """What recomputing an accepted one finds; raises `PeerError` and the child's errors."""
        manifest = await self._manifest(case)
        job = Judge(
            order=await self._order(case, manifest),
            path=self._local(canonical_path_of(case.key)),
            digest=verdict.rollouts_digest,
            thresholds=manifest.thresholds,
            rewards=verdict.rewards,
        )
        found = Outcome(policies=verdict.policies)
        await self._recompute(case, job, prefill, found)
        return found

    def forget_loaded(self) -> None:
        """Note that the prefill child is new and holds no policy."""
        self._loaded = []

    async def examine(self, case: Case, children: Children, hung: str = "") -> Outcome:
        """Check a case; raises `PeerError`, a child's errors, or `PutDown` once queued again."""
        manifest = await self._manifest(case)
        newest = self._peer.newest_checkpoint()
        age = newest.step - case.submission.policy if newest is not None else 0
        if newest is not None and case.submission.lineage < newest.lineage:
            age = manifest.schedule.max_staleness + 1  # a rollback abandoned it: nobody has it
        stale = first_failure([staleness], (age, manifest.schedule.max_staleness))
        if stale is not None:
            return Outcome.of(stale)
        if newest is not None:
            self._duplicates.forget_before((newest.lineage, newest.step - self._run.max_staleness))
        with self._peer.store.pinned(case.order.checkpoint):
            load = await self._fetched(case.order.checkpoint, manifest)
            return await self._examine(case, load.folder, manifest, children, hung)

    async def _examine(
        self, case: Case, folder: str, manifest: RunManifest, children: Children, hung: str
    ) -> Outcome:
        """Run the checks of a case whose order's policy is in `folder`."""
        canonical, accepted = canonical_path_of(case.key), False
        inspect = Inspect(
            order=await self._order(case, manifest),
            path=self._local(path_of(case.key)),
            digest=case.submission.digest,
            canonical_path=self._local(canonical),
            tokenizer_folder=folder,
            bytes_max=manifest.limits.submission_bytes_max,
            environment_peers=manifest.environment_ids(),
        )
        try:
            outcome = await self._check(case, inspect, manifest, children, hung)
            _note_states(outcome, inspect.order, manifest)
            if not outcome.failed:
                await self._disk.sync(canonical)  # durable before the verdict that names it
                accepted = True
            return outcome
        finally:
            if not accepted:
                await self._disk.remove(canonical)

    async def _check(
        self, case: Case, inspect: Inspect, manifest: RunManifest, children: Children, hung: str
    ) -> Outcome:
        """Inspect a case's file, recompute a few rows, then grade it, since programs that a worker
        wrote instead of sampling may use all their seconds. Recompute all of it if it is drawn."""
        inspected = await children.inspector.inspect(inspect)
        children.restarts.succeeded()
        outcome, thresholds = Outcome.of(inspected), manifest.thresholds
        if max(inspected.policies, default=0) > case.submission.policy:
            newest = self._peer.announced.newest_of(case.submission.lineage)
            run([published], (max(inspected.policies), newest or 0), outcome)
        history = History(
            worker=case.worker,
            policy=(case.submission.lineage, case.submission.policy),
            group_digests=inspected.group_digests,
            tokens=inspected.tokens,
            duplicates=self._duplicates,
            pace=self._paces.of(case.worker, Pace),
            now=self._peer.node.world.now(),
        )
        if outcome.failed:
            return outcome
        stake = self._peer.trusted_part("validator").stake(case.worker, case.submission.step)
        record = Record(self._records.standing(case.worker), thresholds)
        # Fixed before any of the content is judged: that no lie pays rests on the fine, which is
        # computed from the share with which the submission was drawn (`swarm.ledger.record`).
        share = share_to_recompute(inspected.tokens, stake, thresholds)
        outcome.share = 1.0 if record.is_near else share
        job = Judge(
            order=inspect.order,
            path=inspect.canonical_path,
            digest=inspected.canonical_digest,
            thresholds=thresholds,
            rewards=[],
        )
        is_proven = stake >= thresholds.proven_tokens
        count = ROWS_SAMPLED_PROVEN if is_proven else ROWS_SAMPLED
        doubted = await self._sample(case, job, children.prefill, outcome, count)
        if outcome.failed:
            return outcome
        if self._queue.doubt(case, doubted=doubted):
            raise PutDown
        seconds = manifest.limits.grading_seconds * (DOUBTED_SHARE if doubted else 1)
        grade = Grade(digest=inspect.digest, grading_seconds=seconds, hung=hung)
        graded = await children.inspector.grade(grade)
        outcome.add(graded)
        if outcome.failed:
            return outcome
        if graded.episodes:
            await self._grades.complete(
                case, inspect.order.seed(), graded, manifest.limits.grading_seconds
            )
        outcome.settle(graded)
        # Ungraded groups are credited too, so nobody may earn by text of its own that cannot be
        # graded. A second opinion is worth nothing without a recomputation.
        ungraded, striking = outcome.ungraded, history.is_striking
        drawn = prefill_wanted(self._secret, case.submission.digest, outcome.share)
        if ungraded or striking or drawn or case.first is not None:
            job = msgspec.structs.replace(job, rewards=outcome.rewards)
            await self._recompute(case, job, children.prefill, outcome)
        if ungraded and not outcome.failed:
            quarantine_ungraded(outcome)
        # After the recomputation, so that no unchecked text is quarantined. The record decides
        # nothing while the run observes: then there are no bets.
        run([speed], history, outcome)
        if outcome.evidence.sampler and case.first is None:
            run([rising], record, outcome)
        return outcome

    async def _sample(
        self, case: Case, job: Judge, prefill: PrefillService, outcome: Outcome, count: int
    ) -> bool:
        """Refuse a submission if a few of its rows do not fit the policy, and then all of them,
        since thresholds are of whole submissions. A sample that passes is no evidence.

        Returns whether one that passes, since the run observes, is most probably a fake."""
        rows = job.order.groups * job.order.sampling.group_size
        sample = rows_sampled(self._secret, case.submission.digest, rows, count)
        few = msgspec.structs.replace(job, rows=sample)
        for each in (few, job):
            found = Outcome(policies=outcome.policies)
            judged = await self._recompute(case, each, prefill, found)
            if not found.failed:
                if not job.thresholds.observes:
                    return False
                return max(judged.proofs.error_mean, judged.sampling.margin_mean) >= UNRELATED
        outcome.add(found)
        outcome.evidence = found.evidence
        return False

    async def _manifest(self, case: Case) -> RunManifest:
        with trio.move_on_after(self._run.manifest.limits.verdict_seconds):
            return await self._peer.versions.manifest_of(case.order)
        raise PeerError(f"no peer has version {case.order.run_version} of the run manifest")

    async def _order(self, case: Case, manifest: RunManifest) -> SubmissionOrder:
        """What determines a submission's content; raises `PeerError` as `States.of`."""
        states: list[State] = []
        with trio.move_on_after(manifest.limits.verdict_seconds) as late:
            states = await self._peer.states.of(case.order, manifest)
        if late.cancelled_caught:
            raise PeerError(f"the states of step {case.order.step} have not come in time")
        return submission_order(
            self._run.id,
            manifest,
            case.order,
            worker=case.worker,
            number=case.submission.number,
            entry=case.submission.entry,
            groups=case.submission.groups,
            states=states,
        )

    async def _fetched(self, policy: CheckpointReference, manifest: RunManifest) -> Load:
        """A policy on this disk. Raises `PeerError` if it cannot be fetched."""
        folder = await self._peer.policies.get(
            policy, deadline_seconds=manifest.limits.verdict_seconds
        )
        return Load(policy=policy, folder=self._local(folder))

    def _policies(self, case: Case, steps: Sequence[int]) -> list[CheckpointReference]:
        """A submission's policies; raises `PeerError` for one whose announcement was missed."""
        named = case.order.checkpoint
        found = []
        for step in steps or [named.step]:
            policy = self._peer.reference_of(named.lineage, step) if step != named.step else named
            if policy is None:
                raise PeerError(f"this validator missed the announcement of policy {step}")
            found.append(policy)
        return found

    async def _recompute(
        self, case: Case, job: Judge, prefill: PrefillService, outcome: Outcome
    ) -> Judged:
        """Add the results that need policies, kept here till judged; raises `PeerError`."""
        policies = self._policies(case, outcome.policies)
        manifest = await self._manifest(case)
        with self._peer.store.pinned(*policies):
            loads = [await self._fetched(policy, manifest) for policy in policies]
            async with self._turn:
                if policies == [job.order.policy]:
                    await self._load(loads[0], prefill)
                else:
                    job = msgspec.structs.replace(job, later=loads)
                    self._loaded = []  # the child may drop policies to make room, and then fail
                judged = await prefill.judge(job)
                self._loaded = judged.policies
        self._prefill_restarts.succeeded()
        outcome.add(judged)
        outcome.evidence = judged.evidence
        return judged

    async def _load(self, job: Load, prefill: PrefillService) -> None:
        """Load a policy into the prefill child, unless the child holds it."""
        if job.policy in self._loaded:
            return
        try:
            self._loaded = await prefill.load(job)
        except ChildError:
            self._loaded = []  # the child may have dropped policies to make room
            raise
        except ChildDied as error:
            error.blameless = True  # it died over the policy, not over the submission
            raise

    def _local(self, path: str) -> str:
        return str(self._disk.local_path(path))


def _note_states(outcome: Outcome, order: SubmissionOrder, manifest: RunManifest) -> None:
    """Add to an outcome what the trainer needs for continuations and for a teacher's prompts."""
    if manifest.values.estimate == "continuations" or manifest.objective.teacher_prompt:
        outcome.seed = order.seed()
    if order.continued:
        outcome.continued = [-1] * order.groups
        for each in order.continued:
            outcome.continued[each.group] = each.index
