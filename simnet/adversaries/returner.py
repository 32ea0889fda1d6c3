"""Lies in everything, and returns with a new key whenever it is evicted. *Caught* by `proofs` each
time: a new identity's work is all recomputed, and nothing of it is credited."""

from __future__ import annotations

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind

KIND = Kind(InferenceRole, "inference", fabricates="weights", caught_by="proofs", returns=True)
