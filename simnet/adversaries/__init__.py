"""Adversaries: malicious peers, each a role like the honest roles, on the same seam.

An adversary knows everything that an admitted peer knows, and runs the production code to get that
far; then it makes one attack. Each file is one kind, called by the file's name: its class's or its
own docstring says how the attack ends, and its `KIND` registers it for scenarios and tests.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from importlib import import_module

from simnet.adversaries.base import Kind
from simnet.simulation import Plan

KINDS: dict[str, Kind] = {
    module.name.replace("_", "-"): import_module(f"{__name__}.{module.name}").KIND
    for module in pkgutil.iter_modules(__path__)
    if module.name != "base"
}
"""All kinds of adversaries, by name."""


def disguise(plan: Plan, name: str) -> Plan:
    """Turn a peer's plan into an adversary's."""
    kind, line = KINDS[name], plan.line
    if kind.uplink_bytes_per_second is not None:
        line = dataclasses.replace(line, uplink_bytes_per_second=kind.uplink_bytes_per_second)
    return dataclasses.replace(
        plan, roles=[kind.claims], acts=kind.acts, fabricates=kind.fabricates, line=line
    )
