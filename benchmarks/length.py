"""A policy learns to meet its thinking budget: mean |target − length| before and after.

    python -m benchmarks.length --seeds 3

Prints one JSON object. The prompt names a number of tokens. Any completion of lower-case letters
that ends in time has the full task reward, minus `--alpha` per token off the target. The base
policy has learnt to write letters, in a number unrelated to the target.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from msgspec.structs import replace

from benchmarks.study import TAIL, Variant, band, learn
from peers.demo.recipes import OBJECTIVE, SAMPLING
from peers.engines.demo import make_policy
from peers.environments import Generated, SingleTurn, Task, Transcript
from peers.environments.length import LengthOptions, LengthTargets
from peers.trainer.warmup import Warmup, warm_up
from swarm.terminal.output import print_json

TARGETS = (2, 4, 6, 8, 10)
LONGEST = 12


class Letters(SingleTurn):
    """Three digits ask for letters, without saying how many."""

    name = "letters"
    version = "1"

    def tasks(self) -> Generated:
        """A prompt, and as its answer a random number of letters, which only the SFT uses."""
        return Generated(self._make)

    def grade(self, task: Task, transcript: Transcript) -> float:
        """1.0 for a finished completion of letters only."""
        return float(transcript.finished and transcript.text.isalpha())

    @staticmethod
    def _make(randomness: bytes) -> Task:
        digits = f"{int.from_bytes(randomness[:4], 'big') % 1000:03d}"
        length = 1 + randomness[4] % (LONGEST - 1)
        letters = "".join(chr(ord("a") + byte % 26) for byte in randomness[5 : 5 + length])
        return Task(prompt=f"{digits}>", answer=letters)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2, help="how many seeds, from 0")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--alpha", type=float, default=0.05)
    given = parser.parse_args()
    torch.set_num_threads(1)
    options = LengthOptions(lengths=[*TARGETS], alpha=given.alpha, prompt="{length}:{prompt}")
    environment = LengthTargets(Letters(), options)
    sampling = replace(SAMPLING, max_new_tokens=LONGEST + 2)
    curves = []
    with tempfile.TemporaryDirectory() as name:
        for seed in range(given.seeds):
            base = Path(name) / str(seed)
            make_policy(base, seed)
            warm_up(base, [environment], seed, Warmup(steps_max=60, accuracy=1.0))
            variant = Variant(objective=OBJECTIVE, steps=given.steps)
            curves.append(learn(base, seed, variant, environment=environment, sampling=sampling))
    result = {
        **vars(given),
        "off_target_before": round(statistics.fmean(curve.off_target[0] for curve in curves), 3),
        "off_target_after": round(
            statistics.fmean(statistics.fmean(curve.off_target[-TAIL:]) for curve in curves), 3
        ),
        "task_reward_after": round(statistics.fmean(curve.final for curve in curves), 4),
        "curve": band([curve.off_target for curve in curves]),
    }
    print_json(result)


if __name__ == "__main__":
    main()
