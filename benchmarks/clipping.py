"""One-sided against two-sided clipping on stale rollouts: spikes of the gradient, and collapse.

    python -m benchmarks.clipping --seeds 5 --steps 250

Prints one JSON object: for δ = 4 and without δ, the 99th percentile and the maximum of the gradient
norm (before clipping), and the share of seeds that collapse (a final reward below half of the best
mean over ten steps). Rollouts are `--staleness` steps old and the learning rate is `--rate` times
the demo's, so that ratios leave the clipping range.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.study import TAIL, Curve, Variant, learn, prepared_bases, summary
from peers.demo.recipes import OBJECTIVE, OPTIMISER
from swarm.terminal.output import print_json

ONE_SIDED = 1e9
"""A δ that no ratio reaches: log-ratios are clamped at 20."""


def collapsed(curve: Curve) -> bool:
    """Whether the policy was once more than twice as good as at the end."""
    best = max(
        statistics.fmean(curve.reward[end - TAIL : end])
        for end in range(min(TAIL, len(curve.reward)), len(curve.reward) + 1)
    )
    return curve.final < best / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2, help="how many seeds, from 0")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--staleness", type=int, default=6)
    parser.add_argument("--rate", type=float, default=2.0, help="of the demo's learning rate")
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = vars(given).copy()
    with prepared_bases(given.seeds) as bases:
        for side, delta in (("two_sided", OBJECTIVE.delta), ("one_sided", ONE_SIDED)):
            variant = Variant(
                objective=replace(OBJECTIVE, delta=delta),
                optimiser=replace(OPTIMISER, learning_rate=OPTIMISER.learning_rate * given.rate),
                staleness=given.staleness,
                steps=given.steps,
            )
            curves = [learn(base, seed, variant) for seed, base in enumerate(bases)]
            norms = sorted(norm for curve in curves for norm in curve.gradient_norm)
            result[side] = {
                "gradient_norm_median": norms[len(norms) // 2],
                "gradient_norm_p99": norms[min(len(norms) - 1, int(len(norms) * 0.99))],
                "gradient_norm_max": norms[-1],
                "collapse_rate": sum(map(collapsed, curves)) / len(curves),
                **summary(curves),
            }
    print_json(result)


if __name__ == "__main__":
    main()
