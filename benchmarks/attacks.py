"""Runs beside hostile identities: who is caught, how soon, what a cheat gains, what the run loses.

    python -m benchmarks.attacks --seeds 20 --counts 4
    python -m benchmarks.attacks --kinds staller,verdict-flooder --counts 1,4,16

Prints one JSON object: for each kind of `simnet/adversaries` and number of hostile identities, over
all seeds, beside four honest workers (`tests.attacks.hostile`):

    pace                    policies trained, as a share of the same run without hostile peers
    detected                share of the hostile identities that were evicted
    refused                 share of their judged or announced submissions that were refused
    seconds_until_eviction  virtual time from the start of the run
    tokens_until_eviction   generated tokens for each evicted identity; null unless all were evicted
    net_gain                credited tokens less generated ones: above 0, the attack pays
    honest_refused          honest submissions refused

`benchmarks.detection` has the attacks on text, with real models.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.common import at_least, several
from simnet.adversaries import KINDS
from swarm.terminal.output import print_json
from tests.attacks.hostile import SECONDS, Setting, alone, attacked


def measure(setting: Setting) -> dict[str, Any]:
    """One run beside hostile peers."""
    outcome = attacked(setting)
    undisturbed = alone(setting.seed, setting.seconds)
    judged = outcome.failed.total()
    return {
        "kind": setting.kind,
        "count": setting.count,
        "pace": outcome.policies / max(1, undisturbed.policies),
        "violations": outcome.violations,
        "identities": len(outcome.hostile),
        "evicted": len(outcome.evicted),
        "seconds": list(outcome.evicted.values()),
        "refused": (judged - outcome.failed[""]) / judged if judged else None,
        "generated": outcome.generated_tokens,
        "credited": outcome.hostile_credit,
        "honest_refused": outcome.honest_failed.total(),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row: what became of one kind and number of identities over all seeds."""
    evicted = sum(run["evicted"] for run in runs)
    identities = sum(run["identities"] for run in runs)
    seconds = [each for run in runs for each in run["seconds"]]
    refused = [run["refused"] for run in runs if run["refused"] is not None]
    return {
        "kind": runs[0]["kind"],
        "count": runs[0]["count"],
        "seeds": len(runs),
        "pace": round(statistics.median(run["pace"] for run in runs), 3),
        "pace_min": round(min(run["pace"] for run in runs), 3),
        "detected": round(evicted / max(1, identities), 3),
        "refused": round(statistics.mean(refused), 3) if refused else None,
        "seconds_until_eviction": round(statistics.median(seconds), 1) if seconds else None,
        "tokens_until_eviction": (
            round(sum(run["generated"] for run in runs) / evicted)
            if evicted and evicted == identities
            else None
        ),
        "net_gain": round(statistics.mean(run["credited"] - run["generated"] for run in runs)),
        "honest_refused": sum(run["honest_refused"] for run in runs),
        "violations": [each for run in runs for each in run["violations"]],
    }


def main() -> None:
    arguments = _arguments()
    settings = [
        Setting(kind, count, seed, arguments.seconds)
        for kind in arguments.kinds
        for count in arguments.counts
        for seed in range(1, arguments.seeds + 1)
    ]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for run in pool.map(measure, settings):
            runs.setdefault((run["kind"], run["count"]), []).append(run)
            print(f"{run['kind']} {run['count']}: pace {run['pace']:.2f}", file=sys.stderr)
    report = {"seconds": arguments.seconds, "attacks": [summary(each) for each in runs.values()]}
    print_json(report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", type=several(_kind), default=sorted(KINDS))
    parser.add_argument(
        "--counts", type=several(at_least(1)), default=[1, 4, 16], help="hostile identities"
    )
    parser.add_argument("--seeds", type=at_least(1), default=20)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="virtual time of a run")
    parser.add_argument("--jobs", type=at_least(1), default=1, help="runs at once")
    return parser.parse_args()


def _kind(text: str) -> str:
    if text not in KINDS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(sorted(KINDS))}")
    return text


if __name__ == "__main__":
    main()
