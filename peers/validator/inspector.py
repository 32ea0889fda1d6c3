"""The exact checks of a submission and its rewards, in a child process without torch. The hostile
file itself is opened in another one (`peers.validator.reader`)."""

from collections.abc import Sequence
from pathlib import Path

import blake3
import numpy as np

from peers.environments import Renderer, episodes_of, probe_hash
from peers.environments.collection import Environments, GroupTask
from peers.environments.episodes import EpisodeLimits, grade_segments
from peers.environments.prompt_room import ModelFacts, PromptRoom
from peers.sandbox.launcher import start_launcher
from peers.validator.checks.base import run
from peers.validator.checks.file import CHECKS, REPLAYS, Inspection
from peers.validator.reader import Reader
from swarm.errors import UserError
from swarm.jobs import SubmissionOrder
from swarm.jobs.validation import (
    Grade,
    Graded,
    Inspect,
    Inspected,
    InspectionService,
    InspectionSetup,
    ServedEpisode,
)
from swarm.rollouts.continuations import whole
from swarm.rollouts.rollouts import Rollouts, bounded
from swarm.rollouts.submission_file import ReadLimits
from swarm.run.work import renders_otherwise
from swarm.world.progress import checkpoint
from swarm.world.tasks import JobThread, in_job_thread

UNKNOWN_HASH = bytes(32)
"""The probe hash of an environment in a manifest that was made without one."""


class InspectorService:
    """Implements `swarm.jobs.validation.InspectionService`."""

    reads_in_home = ("checkpoints", "incoming")
    before_keys_close = staticmethod(start_launcher)

    def __init__(self, setup: InspectionSetup) -> None:
        """Load the environments; raises `UserError` for one that is not installed here."""
        self._renderer: Renderer | None = None
        self._references = setup.environments
        """As the manifest has them."""
        self._environments = Environments(setup.environments)
        self._reader = Reader()
        self._alike: set[tuple[bytes, str, str, bytes]] = set()
        """Tokenizers and environments that render the probe tasks like the run's owner."""
        self._thread = JobThread()
        self._held: tuple[bytes, Inspection] | None = None
        """Digest and content of a submission that is to be graded."""

    @in_job_thread
    def inspect(self, job: Inspect) -> Inspected:
        self._held = None
        order = job.order
        self._renderer = renderer = Renderer.current(Path(job.tokenizer_folder), self._renderer)
        facts = ModelFacts.read(Path(job.tokenizer_folder))
        room = PromptRoom.of_policy(
            renderer, facts.max_position_embeddings, order.sampling.max_new_tokens
        )
        try:
            drawn = self._environments.tasks(order, room)
        except UserError as error:
            # The worker is not at fault.
            return Inspected(failed="environment", detail=str(error), quarantined=True)
        differs = self._differing(order, renderer)
        if differs:
            return Inspected(failed="environment", detail=differs, quarantined=True)
        inspection = self._inspection(job, drawn, room, facts)
        found = Inspected()
        run(CHECKS, inspection, found)
        if found.failed:
            return found
        rollouts = inspection.rollouts
        if len(order.environments) > 1:
            found.environments = order.environments_of_groups()
        found.group_digests = _group_digests(rollouts, order.sampling.group_size)
        found.canonical_digest = inspection.contents.canonical_digest
        found.canonical_bytes = inspection.contents.canonical_bytes
        found.tokens = len(rollouts.log_probabilities)
        found.policies = np.unique(rollouts.span_policies).tolist()
        self._held = (job.digest, inspection)
        return found

    @in_job_thread
    def grade(self, job: Grade) -> Graded:
        if self._held is None or self._held[0] != job.digest:
            raise ValueError(f"{job.digest.hex()} was not inspected last")
        _, inspection = self._held
        self._held = None
        inspection.hung, inspection.grading_seconds = job.hung, job.grading_seconds
        graded = Graded()
        run(REPLAYS, inspection, graded)
        if not graded.failed:
            _grade(inspection, graded)
        return graded

    def _differing(self, order: SubmissionOrder, renderer: Renderer) -> str:
        """The environment that renders otherwise than the owner's, else empty: this machine may
        then not judge, since it would find proven faults in honest work."""
        for each in [*self._references, *order.environments]:
            if each.where == "served":
                continue
            key = (renderer.files_hash, each.name, each.version, each.probe_hash)
            if each.probe_hash != UNKNOWN_HASH and key not in self._alike:
                if probe_hash(self._environments.of(each), renderer) != each.probe_hash:
                    return renders_otherwise(each)
                self._alike.add(key)
        return ""

    def _inspection(
        self, job: Inspect, drawn: Sequence[GroupTask | None], room: PromptRoom, config: ModelFacts
    ) -> Inspection:
        order, sampling = job.order, job.order.sampling
        prompts = [None if each is None else [*each.tokens, *each.prefix] for each in drawn]
        several_turns = any(
            each is None or episodes_of(each.environment) is not None for each in drawn
        )
        positions = config.max_position_embeddings
        limits = ReadLimits(
            bytes_max=job.bytes_max,
            rows_max=order.rows(),
            # One more than allowed, so that a longer prompt fails the check `prompts`.
            prompt_tokens_max=max(positions if p is None else len(p) for p in prompts) + 1,
            model_tokens_max=sampling.max_new_tokens + 1,
            environment_tokens_max=positions if several_turns else 0,
        )
        return Inspection(
            read=lambda: self._reader.read(
                Path(job.path), job.digest, Path(job.canonical_path), limits
            ),
            header=order.header_fields(),
            groups=drawn,
            environments=order.environments_of_groups(),
            prompts=prompts,
            group_size=sampling.group_size,
            renderer=room.renderer,
            vocabulary=config.vocab_size,
            limits=EpisodeLimits(sampling.stop_ids, sampling.max_new_tokens, positions),
            swaps_max=sampling.swaps_max,
            run=order.run,
            seed=order.seed(),
            environment_peers=job.environment_peers,
        )

    async def run(self) -> None:
        """Keep the process that reads files running."""
        await self._reader.run()


_SERVICE: type[InspectionService] = InspectorService


def _grade(inspection: Inspection, found: Graded) -> None:
    """Grade local groups, of the arrays that proofs and training use; collect the others."""
    rollouts = inspection.rollouts
    for group, drawn in enumerate(inspection.groups):
        found.graded.append([])
        found.penalties.append([])
        found.parts.append([])
        if inspection.is_given_up(group):
            continue
        if drawn is None:
            found.episodes.extend(_episodes(rollouts, inspection, group))
            continue
        found.has_target |= bool(drawn.task.length_weight)
        _grade_group(rollouts, inspection, group, drawn, found)
    found.ungraded = list(inspection.ungraded.values())


def _rows(inspection: Inspection, group: int) -> range:
    return range(group * inspection.group_size, (group + 1) * inspection.group_size)


def _grade_group(
    rollouts: Rollouts, inspection: Inspection, group: int, drawn: GroupTask, found: Graded
) -> None:
    for row in _rows(inspection, group):
        checkpoint()
        if inspection.is_given_up(group):
            return
        segments = whole(rollouts.rollout(row), len(drawn.prefix)).segments
        with inspection.asking(group):
            graded = grade_segments(
                drawn.environment,
                drawn.task,
                inspection.renderer,
                segments,
                inspection.limits.stop_ids,
            )
            tokens = sum(len(each.tokens) for each in segments if each.kind == "model")
            found.graded[group].append(graded.reward)
            found.penalties[group].append(drawn.task.length_penalty(tokens))
            found.parts[group].append(bounded(graded.parts))


def _episodes(rollouts: Rollouts, inspection: Inspection, group: int) -> list[ServedEpisode]:
    return [
        ServedEpisode(
            group=group,
            sample=sample,
            segments=[list(each.tokens) for each in rollouts.rollout(row).segments],
        )
        for sample, row in enumerate(_rows(inspection, group))
    ]


def _group_digests(rollouts: Rollouts, group_size: int) -> list[bytes]:
    """BLAKE3 of each group: prompt and the rest of each rollout, each preceded by its length."""
    digests = []
    for first in range(0, len(rollouts), group_size):
        hasher = blake3.blake3()
        prompt = len(rollouts.prompt(first))
        rows = [rollouts.row_tokens(row) for row in range(first, first + group_size)]
        for part in [rows[0][:prompt], *(tokens[prompt:] for tokens in rows)]:
            hasher.update(np.array([len(part)], "<i4").tobytes())
            hasher.update(part.astype("<i4").tobytes())
        digests.append(hasher.digest())
    return digests
