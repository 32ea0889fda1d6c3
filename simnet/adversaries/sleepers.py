"""Has no model: hands in programs that sleep, which take long to grade. *Caught*: by check `proofs`
before anything is graded, and evicted."""

from __future__ import annotations

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind

KIND = Kind(InferenceRole, "inference", fabricates="sleepers", caught_by="proofs")
