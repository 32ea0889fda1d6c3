"""How stale may rollouts be? The demo's task with policies 0, 1, 2, 4 and 8 steps behind.

    python -m benchmarks.asynchrony --seeds 5 --steps 250

Prints one JSON object. For both denominators of the ratio (`old`) and each staleness it has the
reward's curve over the seeds, the final reward, and the effective sample size as a share of the
tokens. `worst_up_to_4` is the largest loss of final reward relative to staleness 0, over staleness
up to 4, with `old = generation`. Published claim: up to 4 is as good as synchronous (INTELLECT-2,
§5).
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.study import Variant, learn, prepared_bases, summary
from swarm.terminal.output import print_json

STALENESS = (0, 1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2, help="how many seeds, from 0")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--staleness", type=int, nargs="*", default=list(STALENESS))
    parser.add_argument("--old", nargs="*", default=["generation", "step_start"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, object]] = {old: {} for old in given.old}
    finals: dict[int, float] = {}
    with prepared_bases(given.seeds) as bases:
        for old in given.old:
            for staleness in given.staleness:
                variant = Variant(old=old, staleness=staleness, steps=given.steps)
                curves = [learn(base, seed, variant) for seed, base in enumerate(bases)]
                results[old][str(staleness)] = figures = summary(curves)
                if old == "generation":
                    finals[staleness] = figures["final_reward_mean"]
    result = {"steps": given.steps, "seeds": given.seeds, "old": results}
    near = [finals[0] - final for staleness, final in finals.items() if staleness <= 4]
    if 0 in finals:
        result["worst_up_to_4"] = round(max(near), 4)
    print_json(result)


if __name__ == "__main__":
    main()
