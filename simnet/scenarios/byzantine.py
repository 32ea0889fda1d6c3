"""A small run of which a third lies, while faults befall the others.

The kinds of adversaries follow from the seed, and no two are the same."""

from typing import Any

from simnet.adversaries import KINDS
from simnet.clock import source
from simnet.scenarios import mixed
from simnet.simulation import Simulation

PEERS = 12
PEERS_MIN = 9
WORKLOAD = mixed.WORKLOAD
FAULTS = 4


async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
    everybody = mixed.names(peers)
    workers = everybody[5:]
    liars = workers[-(peers // 3) :]
    known = sorted(name for name, kind in KINDS.items() if not kind.undefended)
    kinds = source(simulation.seed, "adversaries").sample(known, len(liars))
    adversaries = {
        "validator-1" if KINDS[kind].claims == "validator" else name: kind
        for name, kind in zip(liars, kinds, strict=True)
    }
    return await mixed.be_well_again(simulation, everybody, faults=FAULTS, adversaries=adversaries)
