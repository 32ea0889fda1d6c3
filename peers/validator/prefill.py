"""The statistical checks of a submission, in a child process with the policy's weights: one batched
prefill. Its hidden states must fit the proofs, every token be argmax of logits plus noise."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import torch

from peers.engines.device import available_bytes, find_device, is_out_of_memory, use_hardware
from peers.engines.engine import Engine
from peers.engines.memory import need_of
from peers.engines.registry import check_engine, make_engine
from peers.proofs import toploc
from peers.proofs.format import chunk_count, split
from peers.validator.checks.base import run_all
from peers.validator.checks.policy import CHECKS, Recomputation
from peers.validator.evidence.submission import Recomputed, evidence_of, without_bets
from peers.validator.recompute import Completed, Found, proof_figures, recompute, sampling_figures
from swarm.errors import UserError
from swarm.jobs import Load, SubmissionOrder, validation
from swarm.jobs.validation import Judge, Judged, PrefillSetup
from swarm.rollouts.rollouts import Rollouts, check_digest
from swarm.rollouts.seeds import noise_key
from swarm.wire.messages import CheckpointReference
from swarm.world.tasks import JobThread, in_job_thread

PREFILL_TOKENS_MAX = 1 << 15
"""Tokens whose hidden states are held at once. Each takes about 20 KB at a width of 5120, and a
submission of long rollouts has millions."""


class PrefillService:
    """Implements `swarm.jobs.validation.PrefillService`, with the weights of as many policies as
    memory allows: submissions of the current and the previous one alternate. The next one takes
    the place of the oldest, tensor by tensor."""

    reads_in_home = ("checkpoints", "incoming")

    def __init__(self, setup: PrefillSetup) -> None:
        """Check engine and device; raises `UserError` if this machine lacks one of them."""
        check_engine(setup.engine)
        use_hardware(setup.hardware)
        self._setup = setup
        self._device = find_device(setup.hardware.device)
        self._thread = JobThread()
        self._engines: OrderedDict[CheckpointReference, Engine] = OrderedDict()
        # Build the tables of TOPLOC now, not during the first submission.
        warm = [torch.randn(2, 128).bfloat16()]
        toploc.verify(warm, toploc.build(warm))

    @in_job_thread
    def load(self, job: Load) -> list[CheckpointReference]:
        self._load(job)
        return list(self._engines)

    def _load(self, job: Load) -> Engine:
        needed = need_of(Path(job.folder), self._setup.hardware).weights_bytes
        self._engines.pop(job.policy, None)
        is_full = len(self._engines) >= self._setup.policies_kept
        try:
            if self._engines and (is_full or not self._has_room(needed)):
                _, engine = self._engines.popitem(last=False)
                engine.load_weights(Path(job.folder), job.policy.step)
            else:
                engine = self._make(job)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._engines.clear()
            try:
                engine = self._make(job)
            except (RuntimeError, MemoryError) as again:
                if not is_out_of_memory(again):
                    raise
                raise UserError(
                    f"there is no memory for policy {job.policy.step} in {job.folder}; use a "
                    "device with more, or share the layers among several (setting devices)"
                ) from again
        self._engines[job.policy] = engine
        return engine

    def _make(self, job: Load) -> Engine:
        hardware = self._setup.hardware
        return make_engine(self._setup.engine, Path(job.folder), hardware, job.policy.step)

    def _has_room(self, needed: int) -> bool:
        """Whether a policy fits beside those that are loaded."""
        hardware = self._setup.hardware
        if not self._engines or hardware.devices:
            return True
        return needed <= hardware.memory_share * available_bytes(self._device)

    @in_job_thread
    @torch.inference_mode()
    def judge(self, job: Judge) -> Judged:
        if not job.later and job.order.policy not in self._engines:
            raise self._not_loaded(job.order.policy)
        raw = Path(job.path).read_bytes()
        check_digest(raw, job.digest)
        rollouts = Rollouts.from_bytes(raw)
        rows = range(len(rollouts)) if job.rows is None else job.rows
        parts = _parts(rollouts, rows, job.order)
        found = [
            recompute(
                engine,
                _completed(rollouts, batch),
                noise_key(job.order.seed()),
                temperature,
                job.thresholds,
            )
            for (policy, temperature), own in groupby(parts, key=_Part.judged_with)
            for engine in [self._engine(policy, job)]
            for batch in _batches(own)
        ]
        evidence = evidence_of(_recomputed(found, rollouts, parts, job), job.thresholds)
        recomputation = Recomputation(
            proofs=proof_figures([chunk for each in found for chunk in each.chunks]),
            sampling=sampling_figures(np.concatenate([each.margins for each in found])),
            evidence=evidence,
            thresholds=job.thresholds,
        )
        observes = job.thresholds.observes
        return Judged(
            **msgspec.structs.asdict(run_all(CHECKS, recomputation, observes=observes)),
            proofs=recomputation.proofs,
            sampling=recomputation.sampling,
            # Bets against bounds that nobody measured must not count once they are measured.
            evidence=without_bets(evidence) if observes else evidence,
            policies=list(self._engines),
        )

    def _engine(self, step: int, job: Judge) -> Engine:
        """The engine with a policy of the job's lineage, which is loaded if it is not in memory."""
        given = {load.policy.step: load for load in job.later}
        policy = given[step].policy if step in given else job.order.policy
        if policy.step != step:
            raise self._not_loaded(msgspec.structs.replace(policy, step=step))
        if policy not in self._engines:
            return self._load(given[step])
        self._engines.move_to_end(policy)
        return self._engines[policy]

    def _not_loaded(self, policy: CheckpointReference) -> ValueError:
        return ValueError(f"{policy} is not loaded; there are: {list(map(str, self._engines))}")


_SERVICE: type[validation.PrefillService] = PrefillService


@dataclass(frozen=True)
class _Part:
    """The tokens of one rollout that one policy sampled."""

    row: int
    policy: int
    temperature: float
    start: int
    """Position of the first of them."""
    sampled: Sequence[int]
    """Their indices among all tokens of the rollout."""
    proofs: Sequence[bytes]

    def judged_with(self) -> tuple[int, float]:
        """What the parts of a prefill have in common."""
        return self.policy, self.temperature

    @property
    def end(self) -> int:
        """Tokens of the rollout up to the last of them."""
        return self.sampled[-1] + 1


def _parts(rollouts: Rollouts, rows: Sequence[int], order: SubmissionOrder) -> list[_Part]:
    """The spans of some rows, policy by policy."""
    parts, temperatures = [], order.temperatures()
    for row in rows:
        temperature = temperatures[row // order.sampling.group_size]
        rollout, proofs = rollouts.rollout(row), split(rollouts.proof(row))
        sampled, start = rollout.sampled, 0
        for span in rollout.spans:
            count, end = chunk_count(span.tokens), start + span.tokens
            own = sampled[start:end]
            parts.append(_Part(row, span.policy, temperature, start, own, proofs[:count]))
            proofs, start = proofs[count:], end
    return sorted(parts, key=_Part.judged_with)


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Cut parts into runs of at most `PREFILL_TOKENS_MAX` tokens, or of one part."""
    batch: list[_Part] = []
    tokens = 0
    for part in parts:
        if batch and tokens + part.end > PREFILL_TOKENS_MAX:
            yield batch
            batch, tokens = [], 0
        batch.append(part)
        tokens += part.end
    yield batch


def _completed(rollouts: Rollouts, parts: Sequence[_Part]) -> Completed:
    """What a policy sampled; everything before it counts as its prompt."""
    return Completed(
        sequences=[rollouts.row_tokens(part.row)[: part.end].tolist() for part in parts],
        sampled=[part.sampled for part in parts],
        rows=[part.row for part in parts],
        proofs=[part.proofs for part in parts],
        starts=[part.start for part in parts],
    )


def _recomputed(
    found: Sequence[Found], rollouts: Rollouts, parts: Sequence[_Part], job: Judge
) -> Recomputed:
    """A submission's scores, near ties and outcomes by group; without rewards, all equal."""
    size = job.order.sampling.group_size
    ties: dict[int, list[bool]] = {}
    for part, own in zip(parts, (row for each in found for row in each.ties), strict=True):
        ties.setdefault(part.row, []).extend(own)
    groups = [
        [row for row in range(first, first + size) if row in ties]
        for first in range(0, len(rollouts), size)
    ]
    groups = [group for group in groups if group]
    lengths = rollouts.model_lengths()
    stops = job.order.sampling.stop_ids

    def reward(row: int) -> float:
        return job.rewards[row // size][row % size] if job.rewards else 0.0

    def stopped(row: int) -> float:
        return float(rollouts.rollout(row).tokens[-1] in stops)

    def length(row: int) -> float:
        return float(lengths[row])

    return Recomputed(
        margins=np.concatenate([each.margins for each in found]),
        errors=np.concatenate([each.errors for each in found]),
        ties=[[ties[row] for row in group] for group in groups],
        outcomes=[
            [[outcome(row) for row in group] for group in groups]
            for outcome in (reward, stopped, length)
        ],
    )
