"""`python -m simnet plan`: estimates broadcast time, relays needed and the trainer's idle share.

The bound is the least time of any broadcast of F bytes to N receivers (docs/simulation.md): one
copy over the source's uplink, one over the slowest downlink, and all copies over all uplinks
together. In relay-only mode workers forward nothing, so all copies leave the relays. The estimate
is the bound times a factor measured in simulations. The trainer's idle share follows from the
slowest of the three overlapping stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from rich.console import Console

from simnet.report import new_table
from simnet.watch import readable_virtual
from swarm.errors import UserError

MEGABIT = 1e6 / 8

TIMES_THE_BOUND = {"swarm": 1.1, "relay_only": 1.15}
"""Time of a broadcast as a multiple of its bound. Simulated with 10 to 1,000 receivers
(docs/shardcast.md), production peers needed at most 1.09, and 1.13 where only relays forward."""

SLACK = 1.10
"""Relays are enough when the bound is at most this times the bound of the other lines."""

RELAYS_MAX = 1000


@dataclass(frozen=True)
class Network:
    """The network to plan. Rates in Mb/s."""

    model_gb: float
    inference: int
    relays: int
    uplink_mbps: float
    """Uplink of an inference peer; the next field is its downlink."""
    downlink_mbps: float
    relay_uplink_mbps: float
    trainer_uplink_mbps: float

    @property
    def size_bytes(self) -> float:
        return self.model_gb * 1e9

    @property
    def receivers(self) -> int:
        return self.inference + self.relays


def check(network: Network, **others: float | None) -> None:
    """Raise `UserError` with the first figure that makes no sense."""
    for each in fields(network):
        value = getattr(network, each.name)
        option = "--" + each.name.replace("_", "-")
        least: float = 1 if each.name == "inference" else 0
        if not (math.isfinite(value) and value >= least and (value > 0 or each.name == "relays")):
            word = "at least 1" if least else "0 or more" if each.name == "relays" else "above 0"
            raise UserError(f"{option} must be {word}, not {value:g}")
    for name, value in others.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")


def bounds(network: Network) -> dict[str, float]:
    """Seconds of each term of the bound; the largest term binds."""
    size, trainer = network.size_bytes, network.trainer_uplink_mbps * MEGABIT
    uplinks = trainer + MEGABIT * (
        network.relays * network.relay_uplink_mbps + network.inference * network.uplink_mbps
    )
    return {
        "the trainer's uplink": size / trainer,
        "the slowest downlink": size / (network.downlink_mbps * MEGABIT),
        "all uplinks together": network.receivers * size / uplinks,
    }


def relay_only_bounds(network: Network) -> dict[str, float]:
    """`bounds` where inference peers forward nothing; infinite without relays.

    Relays get their own copies from the trainer and from each other.
    """
    relays = network.relays * network.relay_uplink_mbps * MEGABIT
    found = bounds(network)
    alone = math.inf
    if relays:
        both = relays + network.trainer_uplink_mbps * MEGABIT
        alone = network.size_bytes * max(network.inference / relays, network.receivers / both)
    return {
        "the trainer's uplink": found["the trainer's uplink"],
        "the slowest downlink": found["the slowest downlink"],
        "the relays' uplinks": alone,
    }


def binding(terms: dict[str, float]) -> tuple[str, float]:
    name = max(terms, key=lambda term: terms[term])
    return name, terms[name]


def relays_needed(network: Network, terms: Callable[[Network], dict[str, float]]) -> int | None:
    """Fewest relays with which a bound is within `SLACK` of what the trainer's uplink and the
    downlinks allow; None if `RELAYS_MAX` are too few."""
    both = bounds(network)
    floor = max(both["the trainer's uplink"], both["the slowest downlink"])

    def enough(relays: int) -> bool:
        return binding(terms(replace(network, relays=relays)))[1] <= SLACK * floor

    return next((relays for relays in range(RELAYS_MAX + 1) if enough(relays)), None)


def idle_share(
    step_seconds: float, batch_seconds: float, broadcast_seconds: float, asynchrony: int
) -> dict[str, Any]:
    """The trainer's idle time as a share of its time, and its cause.

    Training, broadcast and generation overlap: each step takes as long as the slowest of them. A
    policy is used `asynchrony` steps later. Training it, broadcasting it and generating a batch
    with it must fit into that time and the step's own: step + broadcast + batch <= (asynchrony + 1)
    periods.
    """
    stages = {
        "training": step_seconds,
        "generation": batch_seconds,
        "the broadcast": broadcast_seconds,
        "the whole round": (step_seconds + broadcast_seconds + batch_seconds) / (asynchrony + 1),
    }
    slowest, period = binding(stages)
    return {
        "period_seconds": round(period, 1),
        "slowest": slowest,
        "trainer_idle_share": round(1 - step_seconds / period, 4),
    }


def make_plan(
    network: Network,
    *,
    step_minutes: float | None = None,
    batch_minutes: float | None = None,
    asynchrony: int = 2,
) -> dict[str, Any]:
    """Make the whole plan, as plain data."""
    plan: dict[str, Any] = {"receivers": network.receivers}
    for mode, terms_of in (("swarm", bounds), ("relay_only", relay_only_bounds)):
        terms = terms_of(network)
        by, seconds = binding(terms)
        plan[mode] = {
            "terms_seconds": {name: _rounded(term) for name, term in terms.items()},
            "bound_seconds": _rounded(seconds),
            "binding": by,
            "estimate_seconds": _rounded(seconds * TIMES_THE_BOUND[mode]),
            "relays_needed": relays_needed(network, terms_of),
        }
    if step_minutes is not None:
        step, batch = step_minutes * 60, None if batch_minutes is None else batch_minutes * 60
        broadcast = plan["swarm"]["estimate_seconds"]
        plan["trainer"] = {
            "step_seconds": step,
            "batch_seconds": None if batch is None else round(batch, 1),
            "asynchrony": asynchrony,
            **idle_share(step, batch or 0.0, broadcast, asynchrony),
        }
    return plan


def _rounded(seconds: float) -> float | None:
    return round(seconds, 1) if math.isfinite(seconds) else None


def print_plan(network: Network, plan: dict[str, Any], console: Console) -> None:
    """Print a plan for a person."""
    console.print(
        f"{network.model_gb:g} GB to {network.inference:,} inference peers and {network.relays:,} "
        "relays: how long does a broadcast take?\n"
    )
    table = new_table(None, "", "all peers\nforward pieces", "only relays do")
    sides = [plan["swarm"], plan["relay_only"]]
    for term in dict.fromkeys(term for side in sides for term in side["terms_seconds"]):
        cells = []
        for side in sides:
            shown = _time(side["terms_seconds"][term]) if term in side["terms_seconds"] else "–"
            cells.append(f"binds  {shown}" if term == side["binding"] else shown)
        table.add_row(term, *cells)
    table.add_section()
    for name in ("bound", "estimate"):
        table.add_row(name, *(_time(side[f"{name}_seconds"]) for side in sides))
    console.print(table)
    needed = [
        f"more than {RELAYS_MAX:,}" if side["relays_needed"] is None else side["relays_needed"]
        for side in sides
    ]
    console.print(
        f"\nHow many relays do I need?\n  So that the other lines are the limit (within "
        f"{SLACK - 1:.0%}): {needed[0]} with all peers forwarding pieces, {needed[1]} where only "
        "relays do."
    )
    if "trainer" in plan:
        trainer = plan["trainer"]
        batch = trainer["batch_seconds"]
        console.print(
            f"\nWhat will my trainer idle?\n  {trainer['trainer_idle_share']:.0%} of its time: a "
            f"step comes every {_time(trainer['period_seconds'])}, as long as "
            f"{trainer['slowest']} takes. "
            + (
                "Generation is left out: give --tokens-per-second."
                if batch is None
                else f"Generating a batch takes {_time(batch)}."
            )
        )


def _time(seconds: float | None) -> str:
    return "never" if seconds is None else readable_virtual(seconds)
