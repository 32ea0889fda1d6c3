"""Scenarios: one module each, with `PEERS` (how many by default), `run` and, if it needs other
weather or another workload, `WEATHER` and `WORKLOAD`.

`run(simulation, peers)` makes the peers, does what is to be done to them, and returns figures.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from simnet.compute import Workload
from simnet.network import Weather
from simnet.simulation import Simulation
from swarm.errors import UserError

PEERS_MIN = 10
"""Fewest peers of a scenario that does not say otherwise."""


@dataclass(frozen=True)
class Scenario:
    name: str
    about: str
    """One line."""
    peers: int
    """How many by default."""
    peers_min: int
    """With fewer it makes no sense."""
    run: Callable[[Simulation, int], Awaitable[dict[str, Any]]]
    weather: Weather
    workload: Workload


def names() -> list[str]:
    """Names of the scenarios there are."""
    return sorted(
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(__path__)
        if module.name != "parts"
    )


def load(name: str) -> Scenario:
    """The scenario of this name; raises `UserError` listing those there are."""
    if name not in names():
        raise UserError(f"unknown scenario {name!r}; there are: {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    return Scenario(
        name=name,
        about=(inspect.getdoc(module) or "").partition("\n")[0].rstrip("."),
        peers=module.PEERS,
        peers_min=getattr(module, "PEERS_MIN", PEERS_MIN),
        run=module.run,
        weather=getattr(module, "WEATHER", Weather()),
        workload=getattr(module, "WORKLOAD", Workload()),
    )
