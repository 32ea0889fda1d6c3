"""Earns a record with honest work, then hands in other weights' rollouts. *Caught* by `proofs`, at
once or by an audit: the share that is recomputed follows what a fake could gain, and the eviction
voids the credit it holds."""

from __future__ import annotations

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.jobs import SubmissionOrder

HONEST_STEPS = 6


def fabricates(order: SubmissionOrder) -> str:
    """Other weights, after `HONEST_STEPS`."""
    return "weights" if order.step >= HONEST_STEPS else ""


KIND = Kind(InferenceRole, "inference", fabricates=fabricates, caught_by="proofs")
