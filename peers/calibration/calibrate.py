"""How much honest engines differ on a run's model and prompts, and thresholds from that."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from peers.calibration.thresholds import propose
from peers.calibration.work import HandedIn, Sample, Workload, find, hand_in
from peers.engines.device import DTYPES, find_device
from peers.engines.native import NativeEngine
from peers.environments import Environment
from swarm.errors import UserError
from swarm.wire.manifest import Sampling, Thresholds
from swarm.world.progress import checkpoint

PROPOSED = (
    "proof_exponents_min",
    "proof_mantissa_mean_max",
    "proof_mantissa_median_max",
    "honest_margin",
    "margin_max",
    "honest_proof_error",
    "honest_outliers",
    "log_difference_max",
    "measured_tokens",
    "measured_dtypes",
)
"""Thresholds that depend on the model and the engines."""

GROUPS, GROUP_SIZE, TOKENS_MAX = 16, 4, 64
"""4,096 tokens of each engine class: enough for means, and two minutes for four pairs of a model of
135 million parameters on two cores."""

HEADER = (
    f"{'worker → validator':<34}  tokens  changed  mean margin  max margin  proof error  exponents"
)

Show = Callable[[str], None]
Advance = Callable[[int, int], None]
"""(pairs recomputed, of how many)"""


@dataclass(frozen=True)
class EngineClass:
    """An engine as it may run on a peer."""

    dtype: str
    device: str

    @property
    def name(self) -> str:
        """Its label in tables."""
        return f"{self.dtype} {self.device}"

    def engine(self, folder: Path, kind: type[NativeEngine] = NativeEngine) -> NativeEngine:
        """Load a model."""
        return kind(folder, torch.device(self.device), getattr(torch, self.dtype))


def engine_classes(names: Sequence[str] = ()) -> list[EngineClass]:
    """Engine classes from `dtype[:device]` names; by default fp32 and bf16 on every device here.

    Raises `UserError` for one that this machine does not have.
    """
    if not names:
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        names = [f"{dtype}:{each}" for each in devices for dtype in ("float32", "bfloat16")]
    found = []
    for dtype, _, device in (name.partition(":") for name in names):
        find_device(device or "cpu")
        if dtype not in DTYPES:
            raise UserError(f"--engines names {dtype!r}; dtypes are {', '.join(DTYPES)}")
        found.append(EngineClass(dtype, device or "cpu"))
    return found


@dataclass(frozen=True)
class Calibrated:
    """Proposed thresholds, and how much was measured."""

    thresholds: Thresholds
    chunks: int
    """Honest proofs."""

    @property
    def toml(self) -> str:
        """The `[thresholds]` table of a run description, with the bounds on false positives."""
        chunks, tokens = self.chunks, self.thresholds.measured_tokens
        lines = [
            f"# Measured on {tokens} honest tokens and {chunks} proofs. False positives: a pooled "
            f"check refuses an honest submission with p <= {self.thresholds.refusal_p_value:g};",
            f"# an honest worker is ever evicted with p <= {self.thresholds.eviction_p_value:g}. "
            f"No proof and no token came near its own limit: p < {3 / chunks:.1g} and "
            f"{3 / tokens:.1g} each (95 %).",
            "[thresholds]",
            *(f"{name} = {json.dumps(getattr(self.thresholds, name))}" for name in PROPOSED),
        ]
        return "\n".join(lines) + "\n"


def measure_run(
    model: Path,
    environments: Sequence[Environment],
    sampling: Sampling,
    engines: Sequence[str],
    show: Show,
    advance: Advance,
    temperatures: Sequence[float] = (),
) -> Calibrated:
    """Measure thresholds for a run with its own prompts; raises `UserError`.

    `temperatures`: those of its environments, each measured with all of them; empty: `sampling`'s.

    A submission has `GROUPS` prompts, up to four times as many where completions are short, and
    completions as long as the run's, up to `TOKENS_MAX`: honest differences do not grow with the
    length (docs/benchmarks.md).
    """
    longest = min(sampling.max_new_tokens, TOKENS_MAX)
    measured = replace(
        sampling,
        max_new_tokens=longest,
        group_size=GROUP_SIZE,
        groups_per_submission=GROUPS * min(4, TOKENS_MAX // longest),
    )
    classes = engine_classes(engines)
    found: list[Sample] = []
    for temperature in dict.fromkeys(temperatures or [sampling.temperature]):
        workload = Workload(model, replace(measured, temperature=temperature), environments)
        found += measure_pairs(model, workload, classes, show, advance).values()
    dtypes = sorted({each.dtype for each in classes})
    thresholds = replace(propose([[each] for each in found]), measured_dtypes=dtypes)
    return Calibrated(thresholds, sum(len(each.found.chunks) for each in found))


def measure_pairs(
    folder: Path,
    workload: Workload,
    classes: Sequence[EngineClass],
    show: Show = lambda _line: None,
    advance: Advance = lambda _done, _all: None,
) -> dict[str, Sample]:
    """A submission of every pair of classes, by "worker → validator"; shows a row for each.

    Each class generates once, and a pair is one prefill. One engine is loaded at a time: in the
    second round the first classes recompute what the later ones generated.
    """
    show(HEADER)
    work, sampling = workload.work(0), workload.sampling
    handed_in: dict[EngineClass, HandedIn] = {}
    found: dict[str, Sample] = {}
    for validator in [*classes, *classes[:-1]]:
        engine = validator.engine(folder)
        if validator not in handed_in:
            handed_in[validator] = hand_in(engine, work, sampling)
        for generated, given in handed_in.items():
            row = f"{generated.name} → {validator.name}"
            if row in found:
                continue
            checkpoint()
            judged = find(engine, work, sampling, given)
            apart = np.abs(judged.log_probabilities - given.log_probabilities)
            lengths = [len(tokens) for tokens in given.completions]
            found[row] = Sample(judged, lengths, differences=apart)
            advance(len(found), len(classes) ** 2)
            show(_row(row, found[row]))
    return found


def _row(name: str, sample: Sample) -> str:
    """A pair's row of the table."""
    margins, errors = sample.found.margins, sample.found.errors
    exponents = min(chunk.exponent_matches for chunk in sample.found.chunks)
    return (
        f"{name:<34}  {len(margins):>6}  {(margins > 0).mean():>7.2%}  "
        f"{np.minimum(margins, 1.0).mean():>11.2g}  {margins.max():>10.2g}  "
        f"{errors.mean():>11.4f}  {exponents:>9}"
    )
