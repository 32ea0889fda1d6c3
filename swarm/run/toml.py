"""A run's description: the TOML file from which `swarm run create` signs a manifest.

Tables and keys are the fields of `swarm.wire.manifest.RunManifest`, without the hashes of the
tokenizer and the environments, which are computed. `recipe` names published values for the rest
(`swarm/run/recipes.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.run.bounds import check_manifest_numbers, check_peer_id
from swarm.run.manifest import with_needs
from swarm.run.recipes import apply_recipe
from swarm.terminal.tables import option_texts, read_toml, struct_from_mapping
from swarm.wire.manifest import EnvironmentReference, OptionValue, RunManifest


@dataclass(frozen=True)
class RunDescription:
    """A parsed run description, with the fields that computing the hashes needs."""

    table: dict[str, Any]
    model: str
    environments: list[EnvironmentReference]
    """Environments without their probe hashes."""


@dataclass(frozen=True)
class RunHashes:
    """Computed hashes of a run, which its TOML file does not contain."""

    tokenizer: bytes
    probes: Sequence[bytes]
    """Probe hashes, one per environment."""
    pins: Sequence[Mapping[str, OptionValue]] = ()
    """Options to add to those of the environments, one table per environment; or nothing."""


def describe_run(path: Path) -> RunDescription:
    """Read a run's TOML file. Raises a `UserError` that names the key and its value."""
    table = read_toml(path, str(path))
    table = apply_recipe(table, str(path))
    model = table.get("model")
    if not isinstance(model, str):
        raise UserError(f"{path}: model is {model!r}; it must be text")
    entries = table.get("environments")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: environments is {entries!r}; give at least one [[environments]]")
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("options"), dict):
            entry["options"] = option_texts(entry["options"])
    objective = table.get("objective")
    for field in ("options", "advantage_options"):
        if isinstance(objective, dict) and isinstance(objective.get(field), dict):
            objective[field] = option_texts(objective[field])
    environments = [
        struct_from_mapping(EnvironmentReference, entry, f"{path}: environments[{index}]")
        for index, entry in enumerate(entries)
    ]
    return RunDescription(table, model, environments)


def manifest_from_toml(path: Path, hashes: RunHashes) -> RunManifest:
    """Make the manifest of a TOML file. Raises a `UserError` that names the field and value."""
    table = {**describe_run(path).table, "tokenizer_hash": hashes.tokenizer}
    table["environments"] = [
        {**entry, "probe_hash": probe, "options": {**entry.get("options", {}), **pins}}
        for entry, probe, pins in zip(
            table["environments"],
            hashes.probes,
            hashes.pins or [{} for _ in hashes.probes],
            strict=True,
        )
    ]
    for field in ("trainers", "validators", "environment_peers", "standbys"):
        entries = table.setdefault(field, [])
        if isinstance(entries, list):
            for peer in entries:
                if isinstance(peer, str):
                    check_peer_id(peer, f"{path}: {field}")
            table[field] = [{"peer": e} if isinstance(e, str) else e for e in entries]
    manifest = with_needs(struct_from_mapping(RunManifest, table, str(path)), str(path))
    check_manifest_numbers(manifest, str(path))
    return manifest


def unhashed_manifest(path: Path) -> RunManifest:
    """The manifest in a TOML file, without its hashes; raises as `manifest_from_toml`."""
    unknown = [bytes(32) for _ in describe_run(path).environments]
    return manifest_from_toml(path, RunHashes(tokenizer=bytes(32), probes=unknown))
