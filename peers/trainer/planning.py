"""The plan of a trainer's memory on this machine, made before anything is loaded."""

from dataclasses import replace
from pathlib import Path

from peers.engines.adapter_config import is_adapter
from peers.engines.config import read_text_config
from peers.learning import packing
from peers.learning.plan import Model, Workload, fit, machine_of, sharding_of
from peers.learning.ranks import Ranks
from swarm.jobs.memory import MemoryPlan
from swarm.jobs.training import Sharding, StartTraining, TrainingTerms

PROMPT_TOKENS = 1024
"""Tokens of a prompt, beside `max_new_tokens` of the model's, in the longest sequence planned."""


def plan_training(job: StartTraining, ranks: Ranks) -> MemoryPlan:
    """Plan this rank's memory, with passes that fit; raises `UserError` for a broken config."""
    positions = read_text_config(Path(job.model))["max_position_embeddings"]
    adapter = job.terms.adapter
    work = workload_of(job.terms, job.sharding, positions, ranks.world)
    if job.terms.objective.teacher_weight:
        is_other = bool(job.teacher) and not is_adapter(Path(job.teacher))
        teacher = Model(Path(job.teacher)) if is_other else None
        work = replace(work, teacher=teacher, reference=work.reference + (not is_other))
    return fit(
        Model(Path(job.model), adapter.rank, tuple(adapter.targets)),
        sharding_of(Path(job.model), job.dtype, job.sharding, ranks.device),
        machine_of(ranks),
        work,
    )


def workload_of(terms: TrainingTerms, sharding: Sharding, positions: int, world: int) -> Workload:
    """What a run asks of its trainer. `positions`: most tokens in a sequence of the model."""
    longest = min(positions, terms.sampling.max_new_tokens + PROMPT_TOKENS)
    completions = terms.schedule.groups_per_step * terms.sampling.group_size
    parts = max(1, world // (sharding.tensor_parallel * sharding.sequence_parallel))
    mine = -(-completions // (terms.optimiser.optimiser_steps * parts))
    most = sharding.pass_tokens or packing.PASS_TOKENS_MAX
    return Workload(
        tokens=max(longest, min(most, mine * longest)),
        longest=longest,
        held=terms.schedule.max_staleness + 2,
        reference=int(terms.objective.needs_reference),
        process=terms.objective.has_process,
    )
