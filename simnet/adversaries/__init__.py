"""Adversaries: malicious peers, each a role like the honest roles, on the same seam.

An adversary runs the production code until it makes one attack. docs/attacks.md says how each
ends. The `KINDS` of each file register them.

For other rooms, by the names in docs/rooms.md: `__init__`
"""

import dataclasses

from simnet.adversaries import identities, relays, workers
from simnet.adversaries.base import Kind
from simnet.simulation import Plan

KINDS: dict[str, Kind] = {**identities.KINDS, **relays.KINDS, **workers.KINDS}


def disguise(plan: Plan, name: str) -> Plan:
    """Turn a peer's plan into an adversary's."""
    kind, line = KINDS[name], plan.line
    if kind.uplink_bytes_per_second is not None:
        line = dataclasses.replace(line, uplink_bytes_per_second=kind.uplink_bytes_per_second)
    return dataclasses.replace(
        plan, roles=[kind.claims], acts=kind.acts, fabricates=kind.fabricates, line=line
    )
