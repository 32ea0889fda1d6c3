"""Cost models of a validator's inspector and prefill."""

import msgspec
import numpy as np
import trio
from blake3 import blake3

from peers.validator.evidence.submission import gains, without_bets
from simnet.compute import rollouts
from simnet.compute.environment import served_episodes
from simnet.compute.setting import Setting
from swarm.jobs import Load, validation
from swarm.rollouts.seeds import digest as digest_of
from swarm.rollouts.signed_turns import BadTurn
from swarm.wire.manifest import Thresholds
from swarm.wire.messages import Check, CheckpointReference, Evidence

EDITED_SHARE = 0.02
"""Share of the tokens that "edits" replace."""
EDIT_MARGIN = 0.5
"""How far behind the seed's token an edited one is: within the bound on a single token."""


class InspectorModel:
    """Cost model of `peers.validator.inspector.InspectorService`."""

    def __init__(self, setting: Setting, setup: validation.InspectionSetup) -> None:
        self._setting = setting
        self._held: tuple[validation.Inspect, rollouts.SimulatedRollouts] | None = None
        """The submission that is to be graded."""

    async def inspect(self, job: validation.Inspect) -> validation.Inspected:
        try:
            found = await rollouts.read_rollouts(self._setting, job.path, job.digest)
        except msgspec.MsgspecError as error:
            return _fault("schema", str(error))
        right = rollouts.rollouts(self._setting, job.order)
        right.edited = found.edited
        right.invented = found.invented  # an inspector cannot see it in the file
        right.invented_row = found.invented_row
        right.sleeps_seconds = found.sleeps_seconds
        right.variant = found.variant
        named, swaps = job.order.policy.step, job.order.sampling.swaps_max
        used = found.policies
        if used and (min(used) < named or used != sorted(set(used)) or len(used) > swaps + 1):
            return _fault("spans", "other policies than the run allows", _exact("schema"))
        right.policies = used
        right.turns = found.turns
        if found != right:
            return _fault("header", "another submission", _exact("schema"))
        order = job.order
        try:
            self._graded(job, found, "")
        except (BadTurn, IndexError) as error:
            return _fault("signed_turns", str(error), _exact("schema"), _exact("header"))
        disk, canonical = self._setting.disk, msgspec.msgpack.encode(found)
        await disk.write(disk.path_of(job.canonical_path), canonical)
        inspected = validation.Inspected(
            checks=[_exact("schema"), _exact("header")],
            environments=order.environments_of_groups() if len(order.environments) > 1 else [],
            group_digests=[
                digest_of("simnet/1/group", found.seed, group.to_bytes(2, "big"))
                for group in range(order.groups)
            ],
            canonical_digest=blake3(canonical).digest(),
            canonical_bytes=len(canonical),
            tokens=sum(map(sum, found.lengths)),
            policies=used or [named],
        )
        self._held = (job, found)
        return inspected

    async def grade(self, job: validation.Grade) -> validation.Graded:
        assert self._held is not None and self._held[0].digest == job.digest
        asked, found = self._held
        if self._setting.hardware.hangs and not job.hung:
            raise rollouts.Crash("environment 'simulated' took too long")
        graded = self._graded(asked, found, job.hung)
        if found.sleeps_seconds:
            rows = sum(map(len, found.lengths))
            await trio.sleep(min(job.grading_seconds, rows * found.sleeps_seconds))
        return graded

    def _graded(
        self, job: validation.Inspect, found: rollouts.SimulatedRollouts, hung: str
    ) -> validation.Graded:
        """The grades of local groups, and the served episodes; raises `BadTurn`."""
        workload = self._setting.workload
        fails = hung or (
            "" if self._setting.hardware.grades else "environment 'simulated' cannot grade"
        )
        rewards = rollouts.true_rewards(workload, found)
        episodes = list(served_episodes(job.order, found, workload.turns, job.environment_peers))
        asked = {group for group, _, _ in episodes}
        local = [group for group in range(job.order.groups) if group not in asked]
        reasons = {group: fails for group in local if fails}
        for group in rollouts.ungradable_groups(workload, found):
            if group in local:
                reasons.setdefault(group, "environment 'simulated' cannot know the reward")
        return validation.Graded(
            graded=[rewards[group] if group in local else [] for group in range(job.order.groups)],
            penalties=[
                [0.0] * len(lengths) if group in local else []
                for group, lengths in enumerate(found.lengths)
            ],
            parts=[
                [{} for _ in lengths] if group in local else []
                for group, lengths in enumerate(found.lengths)
            ],
            episodes=[
                validation.ServedEpisode(group=group, sample=sample, segments=segments)
                for group, sample, segments in episodes
            ],
            ungraded=[
                validation.UngradedGroup(group=group, reason=reason, not_gradable=not fails)
                for group, reason in sorted(reasons.items())
            ],
        )


def _exact(name: str, faults: int = 0) -> Check:
    return Check(name=name, figure=faults, threshold=0, passed=faults == 0)


def _fault(check: str, detail: str, *passed: Check) -> validation.Inspected:
    return validation.Inspected(
        checks=[*passed, _exact(check, 1)], failed=check, detail=detail, proven_fault=True
    )


class PrefillModel:
    """Cost model of `peers.validator.prefill.PrefillService`."""

    def __init__(self, setting: Setting, setup: validation.PrefillSetup) -> None:
        self._setting = setting
        self._kept = setup.policies_kept
        self._policies: list[CheckpointReference] = []

    async def load(self, job: Load) -> list[CheckpointReference]:
        size = self._setting.workload.model_bytes
        await trio.sleep(size / self._setting.hardware.load_bytes_per_second)
        self._policies = [*(held for held in self._policies if held != job.policy), job.policy]
        self._policies = self._policies[-self._kept :]
        return list(self._policies)

    async def judge(self, job: validation.Judge) -> validation.Judged:
        for load in job.later:
            if load.policy not in self._policies:
                await self.load(load)
        if not job.later and job.order.policy not in self._policies:
            raise ValueError(f"{job.order.policy} is not loaded")
        found = await rollouts.read_rollouts(self._setting, job.path, job.digest)
        lengths = [length for group in found.lengths for length in group]
        rows = range(len(lengths)) if job.rows is None else job.rows
        tokens = sum(lengths[row] for row in rows)
        await trio.sleep(tokens / self._setting.hardware.prefill_tokens_per_second)
        least = job.thresholds.proof_exponents_min
        says = self._setting.fabricated(job.order)
        is_fake = found.invented or found.invented_row in rows
        invented = says == "refusal" or (is_fake and says != "approval")
        edited = round(EDITED_SHARE * tokens) if found.edited and says != "approval" else 0
        figure = 0 if invented else 128
        passed, observes = figure >= least, job.thresholds.observes
        evidence = _evidence(tokens, invented, edited, job.thresholds)
        return validation.Judged(
            checks=[Check(name="proofs", figure=figure, threshold=least, passed=passed)],
            failed="" if passed or observes else "proofs",
            detail="" if passed else "the proofs are of another model",
            proofs=validation.ProofFigures(
                chunks=1, chunks_passed=int(passed), error_mean=0.0 if passed else 1.0
            ),
            sampling=validation.SamplingFigures(
                tokens=tokens,
                mismatches=tokens if invented else edited,
                margin_mean=float(invented) or edited * EDIT_MARGIN / tokens,
                margin_max=float(invented) or EDIT_MARGIN * found.edited,
            ),
            evidence=without_bets(evidence) if observes else evidence,
            policies=list(self._policies),
        )


def _evidence(tokens: int, invented: bool, edited: int, thresholds: Thresholds) -> Evidence:
    """The bets on the margins and proofs of a submission; no honest token has a margin here."""
    margins = np.zeros(tokens)
    margins[: tokens if invented else edited] = 1.0 if invented else EDIT_MARGIN
    return Evidence(
        tokens=tokens,
        mismatches=tokens if invented else edited,
        sampler=gains(margins, thresholds.honest_margin),
        policy=gains(np.full(1, float(invented)), thresholds.honest_proof_error),
        text=[0],
        selection=[0],
    )
