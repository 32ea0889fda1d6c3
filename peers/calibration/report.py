"""`swarm proofs calibrate`: run the comparison and report it."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peers.calibration.calibrate import Calibration, calibrate, engine_classes
from peers.calibration.plot import draw_roc
from peers.calibration.thresholds import Assessment, assess, propose
from peers.calibration.workload import Workload
from peers.engines.config import read_supported_config
from peers.engines.device import DTYPES, find_device
from peers.environments import load
from swarm.errors import UserError
from swarm.manifest import Sampling, Thresholds

PROPOSED = (
    "proof_exponents_min",
    "proof_mantissa_mean_max",
    "proof_mantissa_median_max",
    "honest_margin",
    "margin_max",
    "honest_proof_error",
    "honest_outliers",
)
"""Thresholds that depend on the model and the engines."""


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
    plot: Path | None


@dataclass(frozen=True)
class CalibrationReport:
    """The proposed thresholds, and what they make of honest workers and of cheats."""

    thresholds: Thresholds
    honest: dict[str, Assessment]
    attacks: dict[str, Assessment]

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
            *(f"{name} = {getattr(self.thresholds, name)}" for name in PROPOSED),
        ]
        return "\n".join(lines) + "\n"

    def summary(self) -> dict[str, Any]:
        """The report for a program to read."""
        return {
            "thresholds": {name: getattr(self.thresholds, name) for name in PROPOSED},
            "honest": {name: asdict(each) for name, each in self.honest.items()},
            "attacks": {name: asdict(each) for name, each in self.attacks.items()},
        }


def run_calibration(options: CalibrationOptions) -> CalibrationReport:
    """Calibrate; raises `UserError` for wrong options."""
    torch.set_num_threads(options.threads)
    classes = engine_classes(options.engines)
    for each in classes:
        find_device(each.device)
        if each.dtype not in DTYPES:
            raise UserError(f"--engines names {each.dtype!r}; dtypes are {', '.join(DTYPES)}")
    name, _, version = (options.environment or "").partition("@")
    environment = load(name, version, options.environment_options) if name else None
    workload = Workload(options.model, _sampling(options), environment)
    found = calibrate(
        options.model,
        workload,
        classes,
        options.submissions,
        options.previous,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    thresholds = propose(list(found.honest.values()))
    report = assess_all(found, thresholds)
    if options.plot is not None:
        draw_roc(report.honest, report.attacks, options.plot)
    return report


def assess_all(found: Calibration, thresholds: Thresholds) -> CalibrationReport:
    """What thresholds make of all samples."""
    return CalibrationReport(
        thresholds=thresholds,
        honest={name: assess(samples, thresholds) for name, samples in found.honest.items()},
        attacks={name: assess(samples, thresholds) for name, samples in found.attacks.items()},
    )


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


def to_text(report: CalibrationReport) -> str:
    """The report as a table, and the proposed thresholds."""
    width = max(len(name) for name in (*report.honest, *report.attacks))
    lines = [
        f"{'worker':<{width}}  refused  tokens until eviction  evidence      exponents  "
        "proof error  mean margin  max margin"
    ]
    for name, each in (*report.honest.items(), *report.attacks.items()):
        evicted = each.tokens_until_eviction
        lines.append(
            f"{name:<{width}}  {each.refused:>3}/{each.submissions:<3}  "
            f"{'not in ' + str(each.tokens) if evicted is None else evicted:>21}  "
            f"{each.process if evicted is not None else '':<12}  {each.exponents_min:>9}  "
            f"{each.mean_error:>11.4f}  {each.mean_margin:>11.2g}  {each.margin_max:>10.2g}"
        )
    return "\n".join(lines) + "\n\n" + report.toml.rstrip()
