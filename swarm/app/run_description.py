"""Conversion of a run's TOML description to an unsigned manifest."""

from __future__ import annotations

import sys
from pathlib import Path

from swarm.app.run_probe import probe_hashes, probe_run
from swarm.messages import RunManifest
from swarm.run.toml import describe_run, manifest_from_toml


def described(file: Path, tokenizer: Path | None) -> RunManifest:
    """Make and check the manifest that a TOML file describes; warnings go to standard error.

    `tokenizer` is a folder; None stands for the model's folder. Raises `UserError` if the run could
    not work.
    """
    description = describe_run(file)
    folder = tokenizer or Path(description.model)
    manifest = manifest_from_toml(file, probe_hashes(folder, description.environments))
    for warning in probe_run(manifest, folder, str(file)):
        print(f"warning: {warning}", file=sys.stderr)
    return manifest
