"""Hands in files that cannot be parsed, and returns with a new key whenever it is evicted. *Caught*
by `schema` each time: a file costs a read, and an identity its admission."""

from __future__ import annotations

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind

KIND = Kind(InferenceRole, "inference", fabricates="garbage", caught_by="schema", returns=True)
