"""Delivers rollouts that its seed does not give. *Caught*: by check `header`, and evicted."""

from __future__ import annotations

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind

KIND = Kind(InferenceRole, "inference", fabricates="prompts", caught_by="header")
