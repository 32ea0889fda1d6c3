"""Scenarios: TOML files (`simnet.scenarios.written`), and modules with `PEERS` (their default
number), `run` and, for another workload, `WORKLOAD`.

`run(simulation, peers)` makes the peers, runs the scenario, and returns its figures.

For other rooms, by the names in docs/rooms.md: `__init__`, `parts`, `several_trainers`, `steady`
"""

import importlib
import inspect
import pkgutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simnet.compute.setting import Workload
from simnet.scenarios.written import Written
from simnet.simulation import Simulation
from swarm.errors import UserError

FOLDER = Path(__file__).parent
_HELPERS = ("parts", "written")

PEERS_MIN = 10
"""Fewest peers of a scenario that sets no number of its own."""


@dataclass(frozen=True)
class Scenario:
    name: str
    about: str
    """One line that describes it."""
    peers: int
    peers_min: int
    """Fewest peers with which the scenario makes sense."""
    run: Callable[[Simulation, int], Awaitable[dict[str, Any]]]
    workload: Workload


def names() -> list[str]:
    modules = [
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(__path__)
        if module.name not in _HELPERS
    ]
    return sorted([*modules, *(path.stem for path in FOLDER.glob("*.toml"))])


def load(name: str) -> Scenario:
    """Load the scenario of this name, or from this TOML file; raises `UserError`."""
    module: Any
    if name.endswith(".toml"):
        module = Written(Path(name))
    elif name not in names():
        raise UserError(
            f"unknown scenario {name!r}; there are: {', '.join(names())}, or give a .toml file"
        )
    elif (path := FOLDER / f"{name}.toml").exists():
        module = Written(path)
    else:
        module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    about = module.about if isinstance(module, Written) else inspect.getdoc(module) or ""
    return Scenario(
        name=name,
        about=about.partition("\n")[0].rstrip("."),
        peers=module.PEERS,
        peers_min=getattr(module, "PEERS_MIN", PEERS_MIN),
        run=module.run,
        workload=getattr(module, "WORKLOAD", Workload()),
    )
