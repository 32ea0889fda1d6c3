"""A sampler that computes otherwise than the trainer: what it costs, and what corrections save.

    python -m benchmarks.mismatch --seeds 5 --steps 100
    python -m benchmarks.mismatch --only "2.5 nats" --seeds 5

Trains the demo's recipe in one process with an engine in bf16, with hidden states rounded as fp8,
and with noise of 0.1 to 2.5 nats on a tenth of the positions' logits; each without a correction
(`grpo`, which sees the trainer's own log-probabilities of the samples) and with those that use what
the engine reports (`objective.behaviour = "engine"`, arXiv 2605.14220). Prints what
`benchmarks.studies` prints of each.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from msgspec import structs

from benchmarks.studies import Variant, run
from peers.demo.recipes import OBJECTIVE
from peers.engines.native import NativeEngine
from swarm.wire.manifest import Objective

BLURRED_SHARE = 0.1
"""Share of the positions whose logits have noise."""


class Blurred(NativeEngine):
    """An engine whose logits are off by normal noise of `nats`, or whose states are rounded."""

    def __init__(self, folder: Path, nats: float = 0.0) -> None:
        super().__init__(folder)
        self._nats, self._generator = nats, torch.Generator().manual_seed(0)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        if not self._nats:
            return super().logits(states.to(torch.float8_e4m3fn).to(states.dtype))
        exact = super().logits(states)
        noisy = torch.rand(len(exact), 1, generator=self._generator) < BLURRED_SHARE
        noise = torch.randn(exact.shape, generator=self._generator)
        return exact + noisy * self._nats * noise


ENGINES: dict[str, Callable[[Path], NativeEngine]] = {
    "fp32": NativeEngine,
    "bf16": functools.partial(NativeEngine, dtype=torch.bfloat16),
    "fp8 states": Blurred,
    **{f"{nats:g} nats": functools.partial(Blurred, nats=nats) for nats in (0.1, 0.5, 2.5)},
}


def seen_by(objective: Objective) -> Variant:
    """The recipe with an objective; those that weigh old against μ need the step's start."""
    start = objective.name in ("tis", "icepop")
    return Variant(objective, old="step_start" if start else "generation")


_ENGINE = structs.replace(OBJECTIVE, behaviour="engine")
CORRECTIONS = {
    "none": seen_by(OBJECTIVE),
    "grpo": seen_by(_ENGINE),
    "tis": seen_by(structs.replace(_ENGINE, name="tis")),
    "mis": seen_by(structs.replace(_ENGINE, name="tis", options={"beyond": "mask"})),
    "sequence tis": seen_by(structs.replace(_ENGINE, name="tis", options={"unit": "sequence"})),
    "icepop": seen_by(structs.replace(_ENGINE, name="icepop")),
    "dppo": seen_by(structs.replace(_ENGINE, name="dppo")),
    "kl": seen_by(structs.replace(_ENGINE, sampler_kl_coefficient=1e-3)),
}
VARIANTS = {
    f"{made}; {label}": replace(variant, engine=engine)
    for made, engine in ENGINES.items()
    for label, variant in CORRECTIONS.items()
    if made != "fp32" or label == "none"
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.set_defaults(study="mismatch")
    run(parser, {"mismatch": VARIANTS})
