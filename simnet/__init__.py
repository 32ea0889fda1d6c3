"""Simulated networks: the production peers in virtual time, reproducibly from one seed.

`clock` runs a trio program in virtual time. It, `disk`, `compute` and `network` (with `flows`)
implement the seam to the machine, and `simulation` runs production peers on it. `python -m simnet
run` runs the `scenarios`. See docs/simulation.md.

The names below are the library's face (docs/library.md), loaded on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simnet.library import print_report, run_scenario, scenario_names

__all__ = ["print_report", "run_scenario", "scenario_names"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'simnet' has no attribute {name!r}")
    from simnet import library

    return getattr(library, name)


def __dir__() -> list[str]:
    return __all__
