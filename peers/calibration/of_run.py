"""A run's thresholds: measured with its own model as it is made, or kept.

Without measured ones a run observes (`swarm.wire.manifest.Thresholds.measured_tokens`)."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from peers.environments.collection import Environments
from swarm.errors import UserError
from swarm.terminal.progress import progress_bar
from swarm.terminal.tables import read_toml
from swarm.wire.manifest import RunManifest, Thresholds


@dataclass(frozen=True)
class Measuring:
    """What the owner wants of the thresholds."""

    measure: bool = True
    again: bool = False
    """Whether to measure although an earlier version of the run has measured ones."""
    engines: Sequence[str] = ()
    """Engine classes that the run admits; empty: fp32 and bf16 on every device here."""


def settle(
    manifest: RunManifest, before: RunManifest | None, model: Path, wanted: Measuring, where: Path
) -> RunManifest:
    """The manifest with the thresholds that the owner wants: those that its description sets, then
    the description's measured ones, those of `before`, or new ones. Raises `UserError`."""
    if not manifest.thresholds.observes:
        return manifest
    if before is not None and not before.thresholds.observes and not wanted.again:
        return _with(manifest, before.thresholds, where)
    if not wanted.measure:
        return _observing(manifest, where, "")
    if not any(model.glob("*.safetensors")):
        return _observing(manifest, where, f"{model} has no weights to measure with, ")
    try:
        return _with(manifest, _measure(manifest, model, wanted), where)
    except UserError as error:  # a family that the native engine does not know, or a bad row
        return _observing(manifest, where, f"thresholds cannot be measured here ({error}), ")


def _with(manifest: RunManifest, measured: Thresholds, where: Path) -> RunManifest:
    from peers.calibration.calibrate import PROPOSED

    stated = read_toml(where, str(where)).get("thresholds", {})
    taken = {name: getattr(measured, name) for name in PROPOSED if name not in stated}
    thresholds = msgspec.structs.replace(manifest.thresholds, **taken)
    return msgspec.structs.replace(manifest, thresholds=thresholds)


def _observing(manifest: RunManifest, where: Path, why: str) -> RunManifest:
    print(
        f"warning: {where}: {why or 'thresholds were not measured, '}so validators of this run "
        "observe: they refuse and evict nobody for statistics; measure them with swarm run update "
        f"{where} --measure",
        file=sys.stderr,
    )
    return manifest


def _measure(manifest: RunManifest, model: Path, wanted: Measuring) -> Thresholds:
    """Measure with the run's own model and prompts; shows a table, and a bar in a terminal."""
    from peers.calibration.calibrate import measure_run

    installed = Environments(allowed=[each.name for each in manifest.environments])
    environments = [installed.of(each) for each in manifest.environments]
    print(
        f"measuring how far honest engines differ on {model} (once; --no-measure leaves it out)",
        file=sys.stderr,
    )
    with progress_bar("measuring", counted=True) as advance:
        report = measure_run(
            model,
            environments,
            manifest.sampling,
            wanted.engines,
            lambda line: print(line, file=sys.stderr, flush=True),
            advance,
            manifest.sampling.temperatures(manifest.environments),
        )
    print(report.toml, file=sys.stderr)
    return report.thresholds
