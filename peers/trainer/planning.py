"""The plan of a trainer's memory on this machine, made before anything is loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import torch

from peers.engines.config import read_config, read_text_config
from peers.engines.device import find_dtype
from peers.learning import packing
from peers.learning.plan import CONTEXT_BYTES, PROCESS_BYTES, Machine, Model, Workload, fit
from peers.learning.ranks import Ranks
from swarm.jobs.memory import MemoryPlan
from swarm.jobs.training import Sharding, StartTraining, TrainingTerms
from swarm.world.machine import free_memory_bytes

PROMPT_TOKENS = 1024
"""Tokens of a prompt, beside `max_new_tokens` of the model's, in the longest sequence planned."""


def plan_training(job: StartTraining, ranks: Ranks) -> MemoryPlan:
    """Plan this rank's memory, with passes that fit; raises `UserError` for a broken config."""
    positions = read_text_config(Path(job.model))["max_position_embeddings"]
    adapter = job.terms.adapter
    return fit(
        Model(Path(job.model), adapter.rank, tuple(adapter.targets)),
        sharding_of(job, ranks.device),
        machine_of(ranks),
        workload_of(job.terms, job.sharding, positions, ranks.world),
    )


def sharding_of(job: StartTraining, device: torch.device) -> Sharding:
    """The policy's layout, with the precision that the job's dtype means on this device for a model
    stored as its config says."""
    name, config = job.dtype, read_config(Path(job.model))
    if name == "auto" and "bfloat16" in (config.get("dtype"), config.get("torch_dtype")):
        name = "fastest"
    mixed = find_dtype(name, device) == torch.bfloat16
    return msgspec.structs.replace(job.sharding, mixed_precision=mixed)


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
        reference=terms.objective.needs_reference + bool(terms.objective.teacher_weight),
        process=terms.objective.has_process,
    )


def machine_of(ranks: Ranks) -> Machine:
    """This machine, with what is free of its memory now; the same on every rank."""
    kind = ranks.device.type
    device = 0
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        device = min(total, free + CONTEXT_BYTES)  # this process has its context already
    here = min(ranks.world, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world)))
    host = free_memory_bytes()
    host = 0 if host == sys.maxsize else host  # unknown
    least = [-int(most) for most in ranks.max([-device, -host])]
    device, host = least
    return Machine(
        device=kind,
        ranks=ranks.world,
        ranks_here=here,
        device_limit=device,
        host_limit=host + here * PROCESS_BYTES[kind] if host else 0,  # whose libraries are loaded
    )
