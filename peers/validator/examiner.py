"""The examiner: runs the checks of a submission, some of them in child processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import trio

from peers.validator.cases import Case, Outcome, submission_order
from peers.validator.checks.base import first_failure, run
from peers.validator.checks.history import CHECKS as HISTORY
from peers.validator.checks.history import History
from peers.validator.checks.standing import POLICY, SPANS, Age, Named
from peers.validator.inbox import canonical_path_of, path_of
from peers.validator.records import Records
from peers.validator.statistics import Duplicates, Pace, draw_secret, prefill_wanted
from peers.validator.together import Together
from swarm.errors import PeerError
from swarm.jobs import Load
from swarm.jobs.validation import Inspect, InspectionService, Judge, Judged, PrefillService
from swarm.ledger.record import share_to_recompute
from swarm.manifest import RunManifest
from swarm.messages import CheckpointReference
from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import digest
from swarm.world import ChildError
from swarm.world.restarts import Restarts

ANNOUNCEMENT_SECONDS = 5.0
"""Time for the announcement of a policy that a file names to arrive. The worker has downloaded the
policy and generated with it since, so its announcement is older than that."""


class Children(NamedTuple):
    """The services in the validator's child processes."""

    inspector: InspectionService
    prefill: PrefillService
    restarts: Restarts
    """The inspector's."""


class Examiner:
    """Runs the checks of a case, for all lanes."""

    def __init__(self, peer: RunNode, records: Records, prefill_restarts: Restarts) -> None:
        self._peer = peer
        self._run = peer.run
        self._disk = peer.node.disk
        self._secret = draw_secret(peer)
        self._records = records
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)
        self._duplicates = Duplicates()
        self._prefill_restarts = prefill_restarts
        self._loaded: list[CheckpointReference] = []
        """Policies that the prefill child holds."""
        self._together = Together()

    def is_drawn_later(self, submission: bytes) -> bool:
        """Whether an accepted submission that was not recomputed is drawn for an audit."""
        secret = digest("swarm/1/audits", self._secret)
        share = self._run.manifest.thresholds.audit_share
        return prefill_wanted(secret, submission, share)

    def is_current(self, case: Case) -> bool:
        """Whether the prefill child holds a case's policy, or none as new."""
        policy = case.order.checkpoint
        newest = max(((held.lineage, held.step) for held in self._loaded), default=(0, 0))
        return policy in self._loaded or (policy.lineage, policy.step) >= newest

    async def audit(self, case: Case, outcome: Outcome, prefill: PrefillService) -> None:
        """Recompute an accepted submission, and add the results to its outcome.

        Raises `PeerError` when the policy or the manifest cannot be fetched, and the child's
        errors.
        """
        manifest = await self._manifest(case)
        folder = await self._peer.policies.get(
            case.order.checkpoint, deadline_seconds=manifest.limits.verdict_seconds
        )
        job = Judge(
            order=submission_order(
                self._run.id, case.worker, case.submission, case.order, manifest
            ),
            path=self._local(canonical_path_of(case.key)),
            digest=outcome.canonical_digest,
            thresholds=manifest.thresholds,
            rewards=outcome.rewards,
            later=await self._others(case, outcome.policies, manifest),
        )
        await self._recompute(job, self._local(folder), prefill, outcome)

    def forget_loaded(self) -> None:
        """Note that the prefill child is new and holds no policy."""
        self._loaded = []

    async def examine(self, case: Case, children: Children) -> Outcome:
        """Run all checks of a case.

        Raises `PeerError` when the policy or the manifest cannot be fetched, and a child's errors.
        """
        manifest = await self._manifest(case)
        newest = self._peer.newest_checkpoint()
        age = newest.step - case.submission.policy if newest is not None else 0
        if newest is not None and case.submission.lineage < newest.lineage:
            age = manifest.schedule.max_staleness + 1  # a rollback abandoned it: nobody has it
        stale = first_failure(POLICY, Age(age, manifest.schedule.max_staleness))
        if stale is not None:
            return Outcome.of(stale)
        folder = await self._peer.policies.get(
            case.order.checkpoint, deadline_seconds=manifest.limits.verdict_seconds
        )
        canonical, accepted = canonical_path_of(case.key), False
        inspect = Inspect(
            order=submission_order(
                self._run.id, case.worker, case.submission, case.order, manifest
            ),
            path=self._local(path_of(case.key)),
            digest=case.submission.digest,
            canonical_path=self._local(canonical),
            tokenizer_folder=self._local(folder),
            bytes_max=manifest.limits.submission_bytes_max,
        )
        try:
            outcome = await self._check(case, inspect, manifest, children)
            if not outcome.failed:
                await self._disk.sync(canonical)  # durable before the verdict that names it
                accepted = True
            return outcome
        finally:
            if not accepted:
                await self._disk.remove(canonical)

    async def _check(
        self, case: Case, inspect: Inspect, manifest: RunManifest, children: Children
    ) -> Outcome:
        """Inspect a case's file, and recompute its content if the case is drawn for that."""
        inspected = await children.inspector.inspect(inspect)
        children.restarts.succeeded()
        outcome, thresholds = Outcome.of(inspected), manifest.thresholds
        if max(inspected.policies, default=0) > case.submission.policy:
            published = await self._published(case, max(inspected.policies))
            run(SPANS, Named(max(inspected.policies), published), outcome)
        history = History(
            worker=case.worker,
            group_digests=inspected.group_digests,
            tokens=inspected.tokens,
            duplicates=self._duplicates,
            pace=self._paces[case.worker],
            now=self._peer.node.world.now(),
        )
        if outcome.failed:
            return outcome
        ungraded, striking = inspected.ungraded, history.is_striking
        stake = self._records.stake(case.worker, case.submission.step)
        outcome.share = share_to_recompute(inspected.tokens, stake, thresholds)
        drawn = prefill_wanted(self._secret, case.submission.digest, outcome.share)
        if ungraded or striking or drawn or case.first is not None:
            job = Judge(
                order=inspect.order,
                path=inspect.canonical_path,
                digest=inspected.canonical_digest,
                thresholds=thresholds,
                rewards=inspected.rewards,
                later=await self._others(case, inspected.policies, manifest),
            )
            await self._recompute(job, inspect.tokenizer_folder, children.prefill, outcome)
        if ungraded and not outcome.failed:
            # The seed determined these tokens, so the worker did not choose ungradable text.
            outcome.failed, outcome.detail, outcome.quarantined = "environment", ungraded, True
        run(HISTORY, history, outcome)
        return outcome

    async def _manifest(self, case: Case) -> RunManifest:
        """The version of the run manifest that the case's step follows."""
        with trio.move_on_after(self._run.manifest.limits.verdict_seconds):
            return await self._peer.versions.manifest_of(case.order)
        raise PeerError(f"no peer has version {case.order.run_version} of the run manifest")

    async def _published(self, case: Case, policy: int) -> int:
        """Number of the newest policy announced; waits a moment for `policy`, whose announcement
        may be on its way here."""

        def newest() -> int:
            found = self._peer.newest_checkpoint()
            here = found is not None and found.lineage == case.submission.lineage
            return found.step if found is not None and here else case.submission.policy

        with trio.move_on_after(ANNOUNCEMENT_SECONDS):
            await self._peer.checkpoint.wait_until(lambda _: newest() >= policy)
        return newest()

    async def _others(
        self, case: Case, policies: Sequence[int], manifest: RunManifest
    ) -> list[Load]:
        """All policies of a submission, fetched; none if the order's is the only one.

        Raises `PeerError` if one of them cannot be fetched.
        """
        named = case.order.checkpoint
        loads = []
        for step in policies if list(policies) != [named.step] else ():
            found = self._peer.reference_of(named.lineage, step) if step != named.step else named
            if found is None:
                raise PeerError(f"this validator missed the announcement of policy {step}")
            folder = await self._peer.policies.get(
                found, deadline_seconds=manifest.limits.verdict_seconds
            )
            loads.append(Load(policy=found, folder=self._local(folder)))
        return loads

    async def _recompute(
        self, job: Judge, folder: str, prefill: PrefillService, outcome: Outcome
    ) -> None:
        """Add the results of the checks that need the policy in `folder`."""
        if job.later:
            async with self._together.turn:
                judged = await self._judge_policies(job, prefill)
        else:
            load = Load(policy=job.order.policy, folder=folder)
            judged = await self._together.judge(job, prefill, lambda: self._load(load, prefill))
        self._prefill_restarts.succeeded()
        outcome.checks.extend(judged.checks)
        outcome.failed, outcome.detail = judged.failed, judged.detail
        outcome.evidence = judged.evidence

    async def _judge_policies(self, job: Judge, prefill: PrefillService) -> Judged:
        """Judge rollouts of several policies, which the child loads as it needs them."""
        policies = [(load.policy.lineage, load.policy.step) for load in job.later]
        for policy in policies:
            self._peer.store.pin(policy)
        self._loaded = []  # the child may drop policies to make room, and then fail
        try:
            judged = await prefill.judge(job)
        finally:
            for policy in policies:
                self._peer.store.unpin(policy)
        self._loaded = judged.policies
        return judged

    async def _load(self, job: Load, prefill: PrefillService) -> None:
        """Load a policy into the prefill child, unless the child holds it."""
        if job.policy in self._loaded:
            return
        policy = (job.policy.lineage, job.policy.step)
        self._peer.store.pin(policy)
        try:
            loaded = await prefill.load(job)
        except ChildError:
            self._loaded = []  # the child may have dropped policies to make room
            raise
        finally:
            self._peer.store.unpin(policy)
        self._loaded = loaded.policies

    def _local(self, path: str) -> str:
        return str(self._disk.local_path(path))
