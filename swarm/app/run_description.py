"""From a run's description in TOML to its unsigned manifest."""

from __future__ import annotations

import sys
from pathlib import Path

from swarm.app.run_probe import probe_hashes, probe_run
from swarm.messages import RunManifest
from swarm.run.toml import describe_run, manifest_from_toml


def described(file: Path, tokenizer: Path | None) -> RunManifest:
    """Read and check the run that a TOML file describes; warnings go to standard error.

    Raises `UserError` if the run could not work.
    """
    description = describe_run(file)
    folder = tokenizer or Path(description.model)
    manifest = manifest_from_toml(file, probe_hashes(folder, description.environments))
    for warning in probe_run(manifest, folder, str(file)):
        print(f"warning: {warning}", file=sys.stderr)
    return manifest
