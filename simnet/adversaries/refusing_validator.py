"""A validator that refuses all work of one worker, and claims to have recomputed it. *Undefended*
where the worker asks it first: it is trusted. Its log shows whom it refuses and why, each figure
can be recomputed, and the owner removes it."""

from __future__ import annotations

from peers.validator.role import ValidatorRole
from simnet.adversaries.base import Kind
from swarm.jobs import SubmissionOrder


def fabricates(order: SubmissionOrder) -> str:
    """A refusal, for about a third of all workers."""
    return "refusal" if sum(order.worker.encode()) % 3 == 0 else ""


KIND = Kind(ValidatorRole, "validator", fabricates=fabricates, undefended=True)
