"""Replaces 2 % of its tokens by ones that suit it, each within the bound on a single token.
*Caught* by its evidence, and evicted, though single submissions pass."""

from __future__ import annotations

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind

KIND = Kind(InferenceRole, "inference", fabricates="edits", caught_by="membership.peer_evicted")
