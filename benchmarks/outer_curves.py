"""INTELLECT-1's figures, from a real and a simulated run of several trainers.

    python -m benchmarks.outer_curves --out docs/several-trainers-run.png

Draws perplexity by tokens, trainers present and merged over time, and the share of the time that
goes into inner steps. Prints the same figures by round as one JSON object.

Real: four trainers, each a process on loopback, train the demo's model of 0.23 million parameters
on this repository's documentation. Two begin, the third joins; the second is killed, and comes back
later; the fourth joins last. Simulated: `--trainers` of them on seven continents' lines of 10 Gb/s
exchange contributions of 10 GB, as in `benchmarks.outer`. Four begin, two more join every round
until all are there, then a third of them leaves, one in a round. The simulator computes no model:
its perplexity is that of a law of the tokens merged (Hoffmann et al., arXiv 2203.15556) for 10
billion parameters, and only the tokens are simulated.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import trio

from benchmarks.common import at_least
from benchmarks.outer import COMPUTE_SECONDS, MACHINE_BYTES_PER_SECOND
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.lines import REGIONS, Line
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.terminal.output import print_json
from swarm.wire.manifest import Outer
from tests.end_to_end.harness import REPOSITORY, START_SECONDS, STEP_SECONDS, running_fork_server
from tests.end_to_end.test_several_trainers import make_peers

TRAINERS = 4
INNER_STEPS = 20

SIMULATED_BYTES = 4_000_000
"""Size of a simulated contribution of 10 GB: lines and disks are as much slower."""

LINE_BYTES_PER_SECOND = 1.25e9

SIMULATED_COMPUTE_SECONDS = 60.0
"""Inner steps take as long in the simulation, on which nothing else depends; `COMPUTE_SECONDS` are
counted."""

TOKENS_PER_ROUND = 100 * 128 * 8192
"""Of one trainer of INTELLECT-1."""

VIRTUAL_SECONDS_MAX = 24 * 3600.0


class Point(NamedTuple):
    """A contribution, with what its trainer knew as its inner steps began."""

    seconds: float
    round: int
    figures: dict[str, float]


def by_round(points: Sequence[Point]) -> list[dict[str, float]]:
    """Medians over the trainers, of each round; perplexities besides."""
    rows = []
    for round in sorted({point.round for point in points}):
        of_round = [point for point in points if point.round == round]
        names = {name for point in of_round for name in point.figures}
        row = {
            name: median([p.figures[name] for p in of_round if name in p.figures])
            for name in sorted(names)
        }
        for name in {"loss", "validation_loss"} & names:
            row[name.replace("loss", "perplexity")] = math.exp(row[name])
        row |= {"round": round, "hours": median([p.seconds for p in of_round]) / 3600}
        rows.append({name: float(f"{value:.4g}") for name, value in row.items()})
    return rows


# --- real ----------------------------------------------------------------------------------------


async def real(rounds: int) -> list[Point]:
    """Run four trainers in processes of their own."""
    outer = Outer(
        rounds=rounds, inner_steps=INNER_STEPS, grace_seconds=20.0, deadline_seconds=STEP_SECONDS
    )
    text = "\n".join(page.read_text() for page in sorted((REPOSITORY / "docs").glob("*.md")))
    with tempfile.TemporaryDirectory(prefix="swarm-curves-") as folder:
        home = Path(folder)
        (home / "docs.txt").write_text(text)

        def table(_: Path) -> dict[str, Any]:
            data = [str(home / "docs.txt")]
            return {
                "data": data,
                "sequence_tokens": 65,
                "batch_sequences": 16,
                "validation_sequences": 16,
            }

        with running_fork_server(home) as fork_server:
            bootstrap, *trainers = make_peers(home, fork_server, outer, table, TRAINERS)
            async with trio.open_nursery() as nursery:
                bootstrap.start(nursery)
                await bootstrap.says("peer.listening", seconds=START_SECONDS)
                trainers[0].start(nursery)
                trainers[1].start(nursery)
                for share, number, killed in (
                    (0.2, 2, False), (0.35, 1, True), (0.6, 1, False), (0.7, 3, False),
                ):  # fmt: skip
                    await trainers[0].says(
                        "outer.merged", round=round(share * rounds), seconds=600.0
                    )
                    if killed:
                        await trainers[number].kill()
                    else:
                        trainers[number].start(nursery)
                for peer in trainers:
                    await peer.says("outer.run_complete", seconds=600.0)
                nursery.cancel_scope.cancel()
    told = [event for peer in trainers for event in peer.heard("outer.contributed")]
    began = min(event["time"] - event["seconds"] for event in told)
    return [Point(each["time"] - began, each["round"], each["figures"]) for each in told]


# --- simulated -----------------------------------------------------------------------------------


def simulated(trainers: int, rounds: int, seed: int) -> list[Point]:
    """Simulate trainers that join and leave."""
    scale = SIMULATED_BYTES / 10e9
    machine = MACHINE_BYTES_PER_SECOND * scale
    names = [f"trainer-{number}" for number in range(trainers)]
    simulation = Simulation(seed, workload=Workload(model_bytes=SIMULATED_BYTES))
    points: list[Point] = []
    begun: dict[str, float] = {}

    def hear(now: float, peer: Peer, event: Event) -> None:
        if event.name != "outer.contributed":
            return
        fields, figures = event.fields, dict(event.fields["figures"])
        step = now - fields["seconds"]
        if peer.name in begun:
            synchronisation = step - begun[peer.name]
            figures["utilisation"] = COMPUTE_SECONDS / (COMPUTE_SECONDS + synchronisation)
        begun[peer.name] = now
        figures["loss"] = law(figures["tokens_merged"])
        longer = COMPUTE_SECONDS - SIMULATED_COMPUTE_SECONDS
        points.append(Point(now + fields["round"] * longer, fields["round"], figures))

    simulation.listeners.append(hear)

    async def main() -> None:
        async with simulation.running():
            outer = Outer(rounds=rounds, grace_seconds=3600.0, deadline_seconds=7200.0)
            await start_bootstrap(simulation, trainers=names, validators=names[:1], outer=outer)
            hardware = Hardware(
                step_seconds=SIMULATED_COMPUTE_SECONDS,
                load_bytes_per_second=machine,
                tokens_per_second=TOKENS_PER_ROUND / SIMULATED_COMPUTE_SECONDS,
            )
            line = LINE_BYTES_PER_SECOND * scale
            for number, name in enumerate(names):
                place = Line(REGIONS[number % len(REGIONS)], line, line)
                simulation.add(
                    Plan(name, ["replica"], place, hardware)
                ).disk.bytes_per_second = machine
            for name in names[:4]:
                await simulation.peers[name].start()
            leaving = names[1 : 1 + trainers // 3]
            done = simulation.expect(
                "outer.run_complete", [name for name in names if name not in leaving]
            )
            waiting, first = names[4:], names[0]
            for number in range(1, rounds):
                merged = simulation.expect("outer.merged", [first], reaches(number))
                await simulation.meet(merged, VIRTUAL_SECONDS_MAX)
                if waiting:
                    for name in waiting[:2]:
                        await simulation.peers[name].start()
                    waiting = waiting[2:]
                elif leaving:
                    await simulation.peers[leaving.pop()].kill()
            await simulation.meet(done, VIRTUAL_SECONDS_MAX)

    run_virtual(main, seed=seed, limit_seconds=VIRTUAL_SECONDS_MAX)
    assert not simulation.violations, simulation.violations
    return points


def reaches(round: int) -> Callable[[Event], bool]:
    return lambda event: bool(event.fields["round"] >= round)


def law(tokens: float) -> float:
    """The loss of 10 billion parameters after so many tokens, in nats per token."""
    return 1.69 + 406.4 / math.pow(1e10, 0.34) + 410.7 / math.pow(max(tokens, 1e8), 0.28)


# --- the picture ---------------------------------------------------------------------------------


def draw(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Draw a column for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9, 8), dpi=100, layout="constrained")
    drawn = drawing.subplots(3, len(runs), squeeze=False)
    for column, (title, rows) in enumerate(runs.items()):
        perplexity, trainers, share = (drawn[row][column] for row in range(3))
        tokens = [row["tokens_merged"] for row in rows]
        unit, name = (1e9, "billion") if max(tokens) > 1e9 else (1e6, "million")
        hours = [row["hours"] for row in rows]
        if max(hours) < 1:
            when, clock = [60 * each for each in hours], "minutes"
        else:
            when, clock = hours, "hours"
        for field, label in (
            ("perplexity", "inner steps"), ("validation_perplexity", "data held back"),
        ):  # fmt: skip
            found = [
                (at / unit, row[field]) for at, row in zip(tokens, rows, strict=True)
                if field in row
            ]  # fmt: skip
            if found:
                perplexity.plot(*zip(*found, strict=True), label=label, marker=".")
        perplexity.set(title=title, xlabel=f"{name} tokens merged", ylabel="perplexity", ylim=0)
        for field in ("trainers_present", "trainers_merged"):
            values = [row.get(field, math.nan) for row in rows]
            trainers.plot(when, values, label=field.partition("_")[2], drawstyle="steps-post")
        trainers.set(xlabel=clock, ylabel="trainers", ylim=0)
        share.plot(when, [100 * row.get("utilisation", math.nan) for row in rows], marker=".")
        share.set(xlabel=clock, ylabel="% of the time in inner steps", ylim=(0, 101))
        for axes in (perplexity, trainers, share):
            axes.grid(alpha=0.3)
        perplexity.legend(frameon=False)
        trainers.legend(frameon=False, loc="lower right")
    drawing.savefig(path)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    parser.add_argument("--only", choices=["real", "simulated"])
    parser.add_argument("--real-rounds", type=at_least(5), default=30)
    parser.add_argument("--trainers", type=at_least(5), default=14)
    parser.add_argument("--rounds", type=at_least(5), default=12)
    parser.add_argument("--seed", type=at_least(0), default=1)
    return parser.parse_args()


def main() -> None:
    given = read_arguments()
    runs: dict[str, list[dict[str, float]]] = {}
    if given.only != "simulated":
        runs["real: 4 processes, 0.23 M parameters"] = by_round(trio.run(real, given.real_rounds))
    if given.only != "real":
        runs[f"simulated: {given.trainers} trainers, 10 GB each, 10 Gb/s"] = by_round(
            simulated(given.trainers, given.rounds, given.seed)
        )
    draw(runs, given.out)
    print_json(runs)


if __name__ == "__main__":
    main()
