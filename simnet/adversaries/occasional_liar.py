"""Lies in every eighth submission. *Caught* by `proofs`, as soon as one of these is recomputed."""

from __future__ import annotations

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.jobs import SubmissionOrder


def fabricates(order: SubmissionOrder) -> str:
    """Other weights, in one of eight submissions."""
    return "weights" if order.seed()[0] % 8 == 0 else ""


KIND = Kind(InferenceRole, "inference", fabricates=fabricates, caught_by="proofs")
