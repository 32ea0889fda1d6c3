"""How near to the network's capacity a broadcast of a checkpoint comes, in simulation.

    python -m benchmarks.broadcast --peers 100 --plot broadcast.png
    python -m benchmarks.broadcast --peers 100 --mode relay-only
    python -m benchmarks.broadcast --peers 100 --churn 0.1
    python -m benchmarks.broadcast --growth 10,30,100 --seeds 1 --plot growth.png

Prints one JSON object. Every peer runs the production shardcast code (`benchmarks.swarmcast`). The
clock starts at the announcement and stops when the last piece of the last receiver is verified and
stored. Profile: uplinks 10 % 1 Gb/s, 40 % 200 Mb/s, 50 % 50 Mb/s; downlinks 500 Mb/s or the uplink,
whichever is more; source 1 Gb/s. Bounds: docs/shardcast.md.

It is compared with two models on the same lines and seeds. They have fluid transfers only and no
control messages, so that both appear at their best:

- `published`: the fastest peers are fixed relays, in the number that suits this design best (√N);
  in relay-only mode the same relays are used. Every peer polls each 30 s. Relays fetch the files
  from the source in order, and the other peers fetch them in order from a relay drawn for each
  shard, as far as that relay has them.
- `random_mesh`: each peer has 8 neighbours of its choice and those that chose it, and knows at once
  which pieces they have. It makes 8 requests at a time for random pieces from random neighbours.
  There is no mesh in relay-only mode, where receivers forward nothing.

With churn there is no comparison: in these models no peer leaves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio
import trio.lowlevel

from benchmarks.common import at_least, several
from benchmarks.swarmcast import Case, Outcome, bound, bound_of, broadcast, headline, leavers
from simnet.clock import Timeline, run_virtual, source
from simnet.flows import Flow, Flows, Link
from simnet.large_pages import use_large_pages
from simnet.plot import SUFFIXES as PLOT_SUFFIXES
from swarm.errors import UserError
from swarm.shardcast.manifest import piece_size_for
from swarm.shardcast.rarity import draw
from swarm.terminal.output import check_writable, print_json

POLL_SECONDS = 30.0
SHARDS = 256
"""Shards of a checkpoint in the published design, where a shard has 50 MB. They are larger here, to
save time. A complete shard is forwarded."""
NEIGHBOURS = 8
REQUESTS = 8

RELAY_ONLY_PEERS_MIN = 6
"""With fewer receivers the profile has no relay."""


def main() -> None:
    options = parse(sys.argv[1:])
    use_large_pages()
    print_json(measure(options))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the options; bad options end the program with one error before any work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=at_least(1), default=100, help="receivers")
    parser.add_argument("--mode", choices=["open", "relay-only"], default="open")
    parser.add_argument("--churn", type=float, default=0.0, help="part of the receivers, below 1")
    parser.add_argument("--gb", type=float, default=62.0, help="checkpoint, 10^9 bytes")
    parser.add_argument("--seeds", type=at_least(1), default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument(
        "--growth",
        type=several(at_least(1)),
        help="comma-separated numbers of receivers, instead of --peers",
    )
    parser.add_argument("--plot", type=Path, help="where to draw it")
    options = parser.parse_args(arguments)
    try:
        check_writable("--plot", options.plot, PLOT_SUFFIXES)
    except UserError as error:
        parser.error(str(error))
    option = "--growth" if options.growth else "--peers"
    for peers in options.growth or [options.peers]:
        case = _case(options, peers, options.first_seed)
        if options.mode == "relay-only" and not case.relays:
            parser.error(
                f"{option} {peers}: relay-only mode takes at least {RELAY_ONLY_PEERS_MIN} receivers"
            )
        if leavers(case) >= peers:
            parser.error(f"--churn {options.churn:g}: of {peers} receivers at least one must stay")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the broadcasts, and make the printed object."""
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    counts = options.growth or [options.peers]
    runs = [run_one(options, peers, seed) for peers in counts for seed in seeds]
    ratios = [run["ratio_to_bound"] for run in runs]
    report = {
        "peers": options.growth or options.peers,
        "mode": options.mode,
        "churn": options.churn,
        "checkpoint_bytes": round(options.gb * 1e9),
        "binding_term": runs[0]["binding_term"],
        "ratio_to_bound": ratios,
        "runs": runs,
    }
    if options.plot:
        draw_plot(runs, options.plot)
    for run in runs:
        del run["curves"]
    return report


def _case(options: argparse.Namespace, peers: int, seed: int) -> Case:
    return headline(
        peers,
        seed,
        size_bytes=round(options.gb * 1e9),
        relay_only=options.mode == "relay-only",
        churn=options.churn,
    )


def run_one(options: argparse.Namespace, peers: int, seed: int) -> dict[str, Any]:
    case = _case(options, peers, seed)
    outcome = broadcast(case)
    run = figures(case, outcome)
    curves: dict[str, Any] = {"shardcast": sorted(outcome.finished.values())}
    curves["progress"] = outcome.progress
    if not options.no_baselines and not options.churn:
        models = {"published": published}
        if not case.relays:
            models["random_mesh"] = random_mesh
        for name, model in models.items():
            times = curves[name] = model(case)
            run[name] = summary(times, run["bound_seconds"])
    run["curves"] = curves | {"bound": [max(bound_of(case, n + 1).values()) for n in range(peers)]}
    print(
        f"{peers} peers, seed {seed}: {run['ratio_to_bound']:.3f} times the bound of "
        f"{run['bound_seconds']:.0f} s, {outcome.cpu_seconds:.0f} s of CPU",
        file=sys.stderr,
    )
    return run


def figures(case: Case, outcome: Outcome) -> dict[str, Any]:
    """Figures of one broadcast."""
    terms = bound(case)
    binding = max(terms, key=terms.__getitem__)
    times = sorted(outcome.finished.values())
    own = [at / max(bound_of(case, number + 1).values()) for number, at in enumerate(times)]
    return {
        "peers": len(case.receivers),
        "seed": case.seed,
        "binding_term": binding,
        "bound_seconds": round(terms[binding], 3),
        **summary(times, terms[binding]),
        "finisher_ratio_to_own_bound": {
            "first": round(own[0], 4),
            "median": round(statistics.median(own), 4),
            "last": round(own[-1], 4),
        },
        "pieces_received": outcome.pieces,
        "announcements_share_of_bytes": round(outcome.sent_in_messages / outcome.sent_in_pieces, 6),
        "cpu_seconds": round(outcome.cpu_seconds, 1),
    }


def summary(times: list[float], bound_seconds: float) -> dict[str, float]:
    return {
        "ratio_to_bound": round(times[-1] / bound_seconds, 4),
        "median_seconds": round(statistics.median(times), 3),
        "worst_seconds": round(times[-1], 3),
    }


# --- what it is compared with --------------------------------------------------------------------


class Model:
    """Peers that send each other pieces as fluids, in virtual time and by callbacks only.

    The source is number 0; receivers follow, then relays.
    """

    def __init__(self, case: Case, pieces: int) -> None:
        self.case = case
        self.pieces = pieces
        self.piece_bytes = case.size_bytes / pieces
        self.chance = source(case.seed, "baseline")
        self.timeline = Timeline()
        self.flows = Flows(self.timeline)
        lines = [case.source, *case.receivers, *case.relays]
        self.ups = [Link(line.uplink_bytes_per_second) for line in lines]
        self.downs = [Link(line.downlink_bytes_per_second) for line in lines]
        self.have = [0] * len(lines)
        self.have[0] = (1 << pieces) - 1
        self.done: dict[int, float] = {}
        self.over = trio.Event()
        self._numbers = 0

    def run(self, begin: Callable[[], None]) -> list[float]:
        """Run the model; return the receivers' completion times, sorted."""

        async def virtual() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.timeline.run)
                await trio.lowlevel.checkpoint()
                begin()
                await self.over.wait()
                nursery.cancel_scope.cancel()

        run_virtual(virtual, seed=self.case.seed)
        return sorted(self.done.values())

    def send(self, sender: int, receiver: int, piece: int, then: Callable[[], None]) -> None:
        """Send one piece, and call `then` when it has arrived."""

        def ended(flow: Flow) -> None:
            self.have[receiver] |= 1 << piece
            receivers = len(self.case.receivers)
            if self.have[receiver] == self.have[0] and receiver <= receivers:
                self.done[receiver] = trio.current_time()
                if len(self.done) == receivers:
                    self.over.set()
            then()

        self.flows.start(self.ups[sender], self.downs[receiver], round(self.piece_bytes), ended)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._numbers += 1
        self.timeline.at(trio.current_time() + seconds, "model", self._numbers, action)


def published(case: Case) -> list[float]:
    """Completion times with the published design."""
    model = Model(case, SHARDS)
    receivers = range(1, len(case.receivers) + 1)
    if case.relays:
        relays, others = list(range(receivers.stop, len(model.have))), list(receivers)
    else:
        by_uplink = sorted(receivers, key=lambda peer: -model.ups[peer].bytes_per_second)
        count = round(len(case.receivers) ** 0.5)
        relays, others = by_uplink[:count], by_uplink[count:]
    waiting: dict[int, list[Callable[[], None]]] = {relay: [] for relay in relays}

    def relay_from(relay: int, shard: int) -> None:
        if shard == SHARDS:
            return

        def there() -> None:
            woken, waiting[relay] = waiting[relay], []
            for action in woken:
                action()
            relay_from(relay, shard + 1)

        model.send(0, relay, shard, there)

    def fetch_from(peer: int, shard: int) -> None:
        if shard == SHARDS:
            return
        relay = model.chance.choice(relays)
        if model.have[relay] >> shard & 1:
            model.send(relay, peer, shard, lambda: fetch_from(peer, shard + 1))
        else:
            waiting[relay].append(lambda: fetch_from(peer, shard))

    def begin() -> None:
        for relay in relays:
            model.later(model.chance.uniform(0, POLL_SECONDS), partial(relay_from, relay, 0))
        for peer in others:
            polls = model.chance.uniform(0, POLL_SECONDS) + model.chance.uniform(0, POLL_SECONDS)
            model.later(polls, partial(fetch_from, peer, 0))

    return model.run(begin)


def random_mesh(case: Case) -> list[float]:
    """Completion times with a plain random mesh."""
    piece_bytes = piece_size_for(case.size_bytes)
    model = Model(case, -(-case.size_bytes // piece_bytes))
    everybody = range(len(model.have))
    neighbours: list[dict[int, None]] = [{} for _ in everybody]
    for peer in everybody:
        others = [other for other in everybody if other != peer]
        for other in model.chance.sample(others, min(NEIGHBOURS, len(others))):
            neighbours[peer][other] = neighbours[other][peer] = None
    wanted = [0 if peer == 0 else model.have[0] for peer in everybody]
    free = [0 if peer == 0 else REQUESTS for peer in everybody]

    def ask(peer: int) -> bool:
        offers = [
            (other, able)
            for other in neighbours[peer]
            if (able := wanted[peer] & model.have[other])
        ]
        if not offers:
            return False
        other, able = model.chance.choice(offers)
        piece = draw(able, model.chance)
        wanted[peer] ^= 1 << piece
        free[peer] -= 1
        model.send(other, peer, piece, lambda: there(peer))
        return True

    def there(peer: int) -> None:
        free[peer] += 1
        fill(peer)
        for other in neighbours[peer]:
            if free[other]:
                fill(other)

    def fill(peer: int) -> None:
        while free[peer] and ask(peer):
            pass

    def begin() -> None:
        for peer in neighbours[0]:
            fill(peer)

    return model.run(begin)


# --- the picture ---------------------------------------------------------------------------------


def draw_plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the first run's finishing times with their bounds, and the use of uplinks.

    With several numbers of peers, draw the growth of the time instead of the uplinks.
    """
    import matplotlib  # imported late: only needed for a picture

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5))
    curves = runs[-1]["curves"]
    peers = runs[-1]["peers"]
    names = {
        "shardcast": "shardcast",
        "random_mesh": "plain random mesh",
        "published": "published design (fixed relays)",
    }
    for name, label in names.items():
        if name in curves:
            left.plot(
                [seconds / 60 for seconds in curves[name]],
                range(1, len(curves[name]) + 1),
                label=label,
            )
    left.plot(
        [seconds / 60 for seconds in curves["bound"]],
        range(1, peers + 1),
        "k--",
        label="bound for this number of peers",
    )
    left.set_xlabel("minutes since the announcement")
    left.set_ylabel("peers that have all of it")
    left.set_title(f"{peers} peers, seed {runs[-1]['seed']}")
    _doubling(left.xaxis)
    _legend(left)
    if len({run["peers"] for run in runs}) > 1:
        counts = [run["peers"] for run in runs]
        right.plot(counts, [run["worst_seconds"] / 60 for run in runs], "o-", label="shardcast")
        for name in ("random_mesh", "published"):
            if all(name in run for run in runs):
                minutes = [run[name]["worst_seconds"] / 60 for run in runs]
                right.plot(counts, minutes, "o-", label=names[name])
        right.plot(counts, [run["bound_seconds"] / 60 for run in runs], "k--", label="bound")
        right.set_xlabel("peers")
        right.set_ylabel("minutes until the last one has all of it")
        right.set_ylim(0, None)
        right.set_xscale("log")
        right.set_xticks(counts, [f"{count:,}" for count in counts], minor=False)
        right.set_xticks([], minor=True)
        _legend(right)
    else:
        progress = curves["progress"]
        right.plot([at / 60 for at, _ in progress], [100 * part for _, part in progress])
        right.axvline(runs[-1]["bound_seconds"] / 60, color="k", linestyle="--")
        right.set_xlabel("minutes since the announcement (dashed: the bound)")
        right.set_ylabel("% of all uplinks in use")
        right.set_ylim(0, 105)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _doubling(axis: Any) -> None:
    """Make an axis logarithmic, with plain numbers: 10, 20, 40…"""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axis.axes.set_xscale("log", base=2)
    axis.set_major_locator(LogLocator(2))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(NullFormatter())


def _legend(axes: Any) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=2, frameon=False)


if __name__ == "__main__":
    main()
