"""`swarm proofs calibrate` and `swarm run create`: measure, and report it as it goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from peers.calibration.calibrate import EngineClass, Measurement, engine_classes
from peers.calibration.measure import Sample
from peers.calibration.thresholds import Assessment, assess, draw_roc, propose
from peers.calibration.workload import Workload
from peers.engines.config import read_supported_config
from peers.engines.device import DTYPES, find_device
from peers.environments import Environment, load
from swarm.errors import UserError
from swarm.wire.manifest import Sampling, Thresholds

PROPOSED = (
    "proof_exponents_min",
    "proof_mantissa_mean_max",
    "proof_mantissa_median_max",
    "honest_margin",
    "margin_max",
    "honest_proof_error",
    "honest_outliers",
    "measured_tokens",
    "measured_dtypes",
)
"""Thresholds that depend on the model and the engines."""

HEADER = (
    f"{'worker → validator':<34}  tokens  changed  mean margin  max margin  proof error  exponents"
)

Show = Callable[[str], None]
Advance = Callable[[int, int], None]
"""(submissions recomputed, of how many)"""


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of the command."""

    model: Path
    environment: str | None
    environment_options: dict[str, Any]
    engines: list[str]
    previous: list[Path]
    submissions: int
    groups: int
    group_size: int
    tokens: int
    temperature: float
    threads: int
    cheats: bool
    keep: Path | None
    plot: Path | None


@dataclass(frozen=True)
class CalibrationReport:
    """The proposed thresholds, and what they make of honest workers and of cheats."""

    thresholds: Thresholds
    honest: dict[str, Assessment]
    attacks: dict[str, Assessment] = field(default_factory=dict)

    @property
    def toml(self) -> str:
        """The `[thresholds]` table of a run description, with the bounds on false positives."""
        chunks = sum(each.chunks for each in self.honest.values())
        tokens = sum(each.tokens for each in self.honest.values())
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

    def summary(self) -> dict[str, Any]:
        """The report for a program to read."""
        return {
            "thresholds": {name: getattr(self.thresholds, name) for name in PROPOSED},
            "honest": {name: asdict(each) for name, each in self.honest.items()},
            "attacks": {name: asdict(each) for name, each in self.attacks.items()},
        }


def classes_of(names: Sequence[str]) -> list[EngineClass]:
    """Engine classes by name; raises `UserError` for one that this machine does not have."""
    classes = engine_classes(names)
    for each in classes:
        find_device(each.device)
        if each.dtype not in DTYPES:
            raise UserError(f"--engines names {each.dtype!r}; dtypes are {', '.join(DTYPES)}")
    return classes


def measure_honest(
    measurement: Measurement, classes: Sequence[EngineClass], show: Show, advance: Advance
) -> CalibrationReport:
    """Measure every pair of classes, show a row of the table for each, and propose thresholds."""
    show(HEADER)
    done = 0

    def tell(row: str, samples: list[Sample]) -> None:
        nonlocal done
        done += 1
        advance(done, len(classes) ** 2 * measurement.submissions)
        if len(samples) == measurement.submissions:
            show(honest_row(row, samples))

    found = measurement.honest(classes, tell)
    dtypes = sorted({each.dtype for each in classes})
    thresholds = replace(propose(list(found.values())), measured_dtypes=dtypes)
    honest = {name: assess(samples, thresholds) for name, samples in found.items()}
    return CalibrationReport(thresholds, honest)


def run_calibration(
    options: CalibrationOptions,
    show: Show = lambda _: None,
    advance: Advance = lambda _done, _all: None,
) -> CalibrationReport:
    """Calibrate; raises `UserError` for wrong options."""
    if options.threads:
        torch.set_num_threads(options.threads)
    classes = classes_of(options.engines)
    name, _, version = (options.environment or "").partition("@")
    environment = load(name, version, options.environment_options) if name else None
    cheats = options.cheats or options.plot is not None
    workload = Workload(options.model, _sampling(options), environment, grades=cheats)
    basis = options.environment, options.environment_options
    measurement = Measurement.of(options.model, workload, options.submissions, options.keep, *basis)
    report = measure_honest(measurement, classes, show, advance)
    if not cheats:
        return report
    show("\n" + ATTACKS_HEADER)
    attacks: dict[str, Assessment] = {}

    def tell(row: str, samples: list[Sample]) -> None:
        if len(samples) == options.submissions:
            attacks[row] = assess(samples, report.thresholds)
            show(attack_row(row, attacks[row]))

    measurement.cheats(classes[0], options.previous, tell)
    report = CalibrationReport(report.thresholds, report.honest, attacks)
    if options.plot is not None:
        draw_roc(report.honest, report.attacks, options.plot)
    return report


def measure_run(
    model: Path,
    environments: Sequence[Environment],
    sampling: Sampling,
    engines: Sequence[str],
    keep: Path,
    show: Show,
    advance: Advance,
) -> CalibrationReport:
    """Measure thresholds for a run with its own prompts; raises `UserError`.

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
    workload = Workload(model, measured, *environments, grades=False)
    basis = [(each.name, each.version, str(each.options)) for each in environments]
    measurement = Measurement.of(model, workload, 1, keep, basis)
    return measure_honest(measurement, classes_of(engines), show, advance)


GROUPS, GROUP_SIZE, TOKENS_MAX = 16, 4, 64
"""4,096 tokens of each engine class: enough for means, and two minutes for four pairs of a model of
135 million parameters on two cores."""


def _sampling(options: CalibrationOptions) -> Sampling:
    config = read_supported_config(options.model)
    stops = config.get("eos_token_id")
    return Sampling(
        temperature=options.temperature,
        max_new_tokens=options.tokens,
        stop_ids=stops if isinstance(stops, list) else [] if stops is None else [stops],
        group_size=options.group_size,
        groups_per_submission=options.groups,
    )


def honest_row(name: str, samples: Sequence[Sample]) -> str:
    """A pair's row of the table, which needs no thresholds."""
    margins = np.concatenate([each.found.margins for each in samples])
    errors = np.concatenate([each.found.errors for each in samples])
    exponents = min(c.exponent_matches for each in samples for c in each.found.chunks)
    return (
        f"{name:<34}  {len(margins):>6}  {(margins > 0).mean():>7.2%}  "
        f"{np.minimum(margins, 1.0).mean():>11.2g}  {margins.max():>10.2g}  "
        f"{errors.mean():>11.4f}  {exponents:>9}"
    )


ATTACKS_HEADER = (
    f"{'cheat':<40}  refused  tokens until eviction  evidence    proof error  mean margin"
)


def attack_row(name: str, each: Assessment) -> str:
    """A cheat's row."""
    evicted = each.tokens_until_eviction
    return (
        f"{name:<40}  {each.refused:>3}/{each.submissions:<3}  "
        f"{'not in ' + str(each.tokens) if evicted is None else evicted:>21}  "
        f"{each.process if evicted is not None else '':<10}  {each.mean_error:>11.4f}  "
        f"{each.mean_margin:>11.2g}"
    )
