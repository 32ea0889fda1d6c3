"""A validator that accepts everything. *Harmless* while workers are honest; its verdicts
differ from another validator's on whatever both judge."""

from __future__ import annotations

from peers.validator.role import ValidatorRole
from simnet.adversaries.base import Kind

KIND = Kind(ValidatorRole, "validator", fabricates="approval")
