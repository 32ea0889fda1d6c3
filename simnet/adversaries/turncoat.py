"""Earns a record with the policy's weights, then generates with others. *Caught*: by check `proofs`
and evicted, its held credit void."""

from __future__ import annotations

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind

KIND = Kind(InferenceRole, "inference", fabricates="late weights", caught_by="proofs")
