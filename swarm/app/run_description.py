"""A run as its owner describes it in TOML, and the manifest made of it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from swarm.app.run_probe import probe_hashes, probe_run
from swarm.errors import UserError
from swarm.messages import RunManifest
from swarm.run.bounds import check_manifest_numbers
from swarm.run.toml import manifest_from_toml


def described(file: Path, tokenizer: Path | None) -> RunManifest:
    """The manifest that a TOML file describes, checked; warnings go to standard error.

    Raises `UserError` where nothing could come of the run.
    """
    model, environment, version = _what_to_probe(file)
    folder = tokenizer or Path(model)
    tokenizer_hash, probe_hash = probe_hashes(folder, environment, version)
    manifest = manifest_from_toml(
        file, {"tokenizer_hash": tokenizer_hash, "environment.probe_hash": probe_hash}
    )
    check_manifest_numbers(manifest, str(file))
    for warning in probe_run(manifest, folder, str(file)):
        print(f"warning: {warning}", file=sys.stderr)
    return manifest


def _what_to_probe(file: Path) -> tuple[str, str, str]:
    """(model, environment, its version) as a run's TOML file names them; raises `UserError`."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}") from error
    environment = table.get("environment")
    if not isinstance(environment, dict):
        environment = {}
    found = (table.get("model"), environment.get("name"), environment.get("version"))
    for value, key in zip(found, ("model", "environment.name", "environment.version"), strict=True):
        if not isinstance(value, str):
            raise UserError(f"{file}: {key} is {value!r}; it must be text")
    return str(found[0]), str(found[1]), str(found[2])
