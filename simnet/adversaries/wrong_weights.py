"""Generates with other weights. *Caught*: by check `proofs`, and evicted."""

from __future__ import annotations

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind

KIND = Kind(InferenceRole, "inference", fabricates="weights", caught_by="proofs")
