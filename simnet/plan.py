"""`python -m simnet plan`: estimates broadcast time, relays needed and the trainer's idle share.

The bound is the least time of any broadcast of F bytes to N receivers (docs/simulation.md): one
copy over the source's uplink, one over the slowest downlink, and all copies over all uplinks
together. In relay-only mode workers forward nothing, so all copies leave the relays. The estimate
is the bound times a factor: the ratio of time to bound in a simulated broadcast of production peers
to few receivers on such lines. The trainer's idle share follows from the slowest of the three
overlapping stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from simnet.lines import REGIONS, Line
from simnet.report import DIM, new_table
from simnet.swarmcast import Case, bound, broadcast
from simnet.watch import readable_virtual
from swarm.errors import UserError
from swarm.shardcast.limits import PIECE_BYTES_MAX, PIECES_WANTED

MEGABIT = 1e6 / 8

SIMULATED_RECEIVERS_MAX = 10
"""Most receivers in the simulations: relays and workers in proportion, at least one of each."""

SIMULATED_BYTES_MAX = PIECES_WANTED * PIECE_BYTES_MAX
"""Largest checkpoint that is simulated. A larger one has more pieces, takes longer to simulate, and
comes nearer to its bound."""

SIMULATED_SECONDS_MAX = 5 * 3600.0
"""Longest bound that is simulated: a broadcast of more hours would take too long."""

SIMULATED_UPLINK_MBPS_MIN = 1.0
"""Slowest uplink that is simulated: pieces on slower lines would be cancelled as too slow."""

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


@dataclass(frozen=True)
class Estimate:
    """The time of a simulated broadcast, and its bound."""

    receivers: int
    times_the_bound: float


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
    step_seconds: float, batch_seconds: float | None, broadcast_seconds: float, asynchrony: int
) -> dict[str, Any]:
    """The trainer's idle time as a share of its time, and its cause.

    Training, broadcast and generation overlap: each step takes as long as the slowest of them. A
    policy is used `asynchrony` steps later. Training it, broadcasting it and generating a batch
    with it must fit into that time and the step's own: step + broadcast + batch <= (asynchrony + 1)
    periods.
    """
    batch = batch_seconds or 0.0
    stages = {
        "training": step_seconds,
        "generation": batch,
        "the broadcast": broadcast_seconds,
        "the whole round": (step_seconds + broadcast_seconds + batch) / (asynchrony + 1),
    }
    slowest, period = binding(stages)
    return {
        "period_seconds": round(period, 1),
        "slowest": slowest,
        "trainer_idle_share": round(1 - step_seconds / period, 4),
    }


def simulate(network: Network, *, relay_only: bool, seed: int = 1) -> Estimate | None:
    """Simulate a broadcast by shardcast to few receivers on this network's lines; None where that
    would take too long."""
    case = _small(network, relay_only, seed)
    bound_seconds = max(bound(case).values())
    slowest = min(line.uplink_bytes_per_second for line in case.relays or case.receivers)
    if bound_seconds > SIMULATED_SECONDS_MAX or slowest < SIMULATED_UPLINK_MBPS_MIN * MEGABIT:
        return None
    finished = broadcast(case).finished
    return Estimate(len(finished), max(finished.values()) / bound_seconds)


def _small(network: Network, relay_only: bool, seed: int) -> Case:
    receivers = min(network.receivers, SIMULATED_RECEIVERS_MAX)
    relays = min(network.relays, max(1, round(receivers * network.relays / network.receivers)))
    workers = max(1, receivers - relays)
    # The same ratio of relays to workers as in the network.
    share = (network.relays / network.inference) * (workers / relays) if relays else 1.0
    relay_uplink = network.relay_uplink_mbps * share
    wide = max(relay_uplink, network.downlink_mbps)

    def line(number: int, up: float, down: float) -> Line:
        return Line(REGIONS[number % len(REGIONS)], up * MEGABIT, down * MEGABIT)

    source = line(0, network.trainer_uplink_mbps, wide)
    relaying = [line(each, relay_uplink, wide) for each in range(relays)]
    working = [line(each, network.uplink_mbps, network.downlink_mbps) for each in range(workers)]
    size = round(min(network.size_bytes, SIMULATED_BYTES_MAX))
    if relay_only:
        return Case(seed, size, source, working, relaying)
    return Case(seed, size, source, relaying + working)


def make_plan(
    network: Network,
    *,
    step_minutes: float | None = None,
    batch_minutes: float | None = None,
    asynchrony: int = 2,
    simulated: bool = True,
) -> dict[str, Any]:
    """Make the whole plan, as plain data."""
    swarm_terms, relay_terms = bounds(network), relay_only_bounds(network)
    by, seconds = binding(swarm_terms)
    relay_by, relay_seconds = binding(relay_terms)
    plan: dict[str, Any] = {
        "receivers": network.receivers,
        "swarm": {
            "terms_seconds": _rounded(swarm_terms),
            "bound_seconds": round(seconds, 1),
            "binding": by,
            "relays_needed": relays_needed(network, bounds),
        },
        "relay_only": {
            "terms_seconds": _rounded(relay_terms),
            "bound_seconds": round(relay_seconds, 1) if math.isfinite(relay_seconds) else None,
            "binding": relay_by,
            "relays_needed": relays_needed(network, relay_only_bounds),
        },
    }
    if simulated:
        modes = [("swarm", False)] + [("relay_only", True)] * bool(network.relays)
        for mode, relay_only in modes:
            found = simulate(network, relay_only=relay_only)
            if found is None:
                continue
            plan[mode]["simulated_receivers"] = found.receivers
            plan[mode]["times_the_bound"] = round(found.times_the_bound, 3)
            estimate = plan[mode]["bound_seconds"] * found.times_the_bound
            plan[mode]["estimate_seconds"] = round(estimate, 1)
    if step_minutes is not None:
        broadcast_seconds = plan["swarm"].get("estimate_seconds", seconds)
        plan["trainer"] = {
            "step_seconds": step_minutes * 60,
            "batch_seconds": None if batch_minutes is None else round(batch_minutes * 60, 1),
            "asynchrony": asynchrony,
            **idle_share(
                step_minutes * 60,
                None if batch_minutes is None else batch_minutes * 60,
                broadcast_seconds,
                asynchrony,
            ),
        }
    return plan


def _rounded(terms: dict[str, float]) -> dict[str, float | None]:
    return {n: round(s, 1) if math.isfinite(s) else None for n, s in terms.items()}


# --- for a person ------------------------------------------------------------------------------


def print_plan(network: Network, plan: dict[str, Any], console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    head = Text(f"{network.model_gb:g} GB to {network.inference:,} inference peers", "bold cyan")
    head.append(f" and {network.relays:,} relay{'' if network.relays == 1 else 's'}", "bold cyan")
    console.print(head)
    console.print()
    title = "how long does a broadcast take, at least?"
    table = new_table(title, "", "all peers\nforward pieces", "only relays do")
    swarm, relay = plan["swarm"], plan["relay_only"]
    terms = dict.fromkeys([*swarm["terms_seconds"], *relay["terms_seconds"]])
    for term in terms:
        table.add_row(term, *(_term(side, term) for side in (swarm, relay)))
    table.add_section()
    table.add_row(
        "bound", _time(swarm["bound_seconds"], "bold"), _time(relay["bound_seconds"], "bold")
    )
    simulated = [side for side in (swarm, relay) if "times_the_bound" in side]
    if simulated:
        estimates = (
            _time(side["estimate_seconds"], "bold green") if side in simulated else Text("–", DIM)
            for side in (swarm, relay)
        )
        table.add_row("estimate", *estimates)
    console.print(table)
    if simulated:
        beyond = " and ".join(f"{side['times_the_bound']:.2f}" for side in simulated)
        console.print(
            Text(
                f"The estimate: production peers, simulated, needed {beyond} times their bound to "
                f"{simulated[0]['simulated_receivers']} receivers on such lines.",
                DIM,
            )
        )
    console.print()
    for question, answer in _answers(network, plan):
        console.print(Text(question, "bold"))
        console.print(Text(f"  {answer}"))
        console.print()


def _answers(network: Network, plan: dict[str, Any]) -> list[tuple[str, str]]:
    needed = [
        "with all peers forwarding pieces "
        + _relays(plan["swarm"]["relays_needed"], network.relay_uplink_mbps),
        "where only relays do " + _relays(plan["relay_only"]["relays_needed"], None),
    ]
    relays = (
        f"So that the other lines are the limit (within {SLACK - 1:.0%}): {needed[0]}; "
        f"{needed[1]}. You have {network.relays:,}."
    )
    answers = [("How many relays do I need?", relays)]
    if "trainer" in plan:
        trainer = plan["trainer"]
        period = readable_virtual(trainer["period_seconds"])
        if trainer["trainer_idle_share"] < 0.0005:
            idle = f"Nothing: a step takes {period}, and everything else fits into it."
        else:
            idle = (
                f"{trainer['trainer_idle_share']:.0%} of its time: a step comes every {period}, "
                f"because {trainer['slowest']} takes longer than training."
            )
        if trainer["batch_seconds"] is None:
            idle += " (Generation is left out: give --tokens-per-second.)"
        else:
            idle += f" Generating a batch takes {readable_virtual(trainer['batch_seconds'])}."
        answers.append(("What will my trainer idle?", idle))
    return answers


def _relays(needed: int | None, uplink_mbps: float | None) -> str:
    if needed is None:
        return f"more than {RELAYS_MAX:,}"
    return f"{needed:,}" + (f" of {uplink_mbps:g} Mb/s" if uplink_mbps and needed else "")


def _term(side: dict[str, Any], term: str) -> Text:
    if term not in side["terms_seconds"]:
        return Text("–", DIM)
    shown = _time(side["terms_seconds"][term])
    if term == side["binding"]:
        shown.stylize("bold yellow")
        shown = Text("binds  ", "yellow") + shown
    return shown


def _time(seconds: float | None, style: str = "") -> Text:
    return Text("never" if seconds is None else readable_virtual(seconds), style)
