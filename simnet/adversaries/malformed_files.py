"""Delivers files that cannot be parsed. *Caught*: by check `schema`, and evicted."""

from __future__ import annotations

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind

KIND = Kind(InferenceRole, "inference", fabricates="garbage", caught_by="schema")
