"""Run manifests as people write them: TOML files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from swarm.errors import UserError
from swarm.identity import InvalidPeerId, public_key_of
from swarm.messages import (
    Optimiser,
    RunManifest,
)
from swarm.run.bounds import check_manifest_numbers

StructT = TypeVar("StructT", bound=msgspec.Struct)


def manifest_from_toml(path: Path, computed: Mapping[str, Any]) -> RunManifest:
    """The manifest that a TOML file describes; `computed` are fields no person should type.

    Tables and keys are named as the fields of `swarm.messages.RunManifest`; peers are listed by
    id. Raises `UserError` naming the field and the value.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    _refuse_old_keys(table, path)
    for field in ("trainers", "validators"):
        entries = table.setdefault(field, [])
        if isinstance(entries, list):
            table[field] = [
                {"peer": _peer_id(entry, f"{path}: {field}")} if isinstance(entry, str) else entry
                for entry in entries
            ]
    for name, value in computed.items():
        section, _, key = name.rpartition(".")
        target = table.setdefault(section, {}) if section else table
        if isinstance(target, dict):
            target[key] = value
    manifest = struct_from_mapping(RunManifest, table, str(path))
    check_manifest_numbers(manifest, str(path))
    return manifest


OLD_KEYS = {f"objective.{name}": f"optimiser.{name}" for name in Optimiser.__struct_fields__}
"""What keys of a run's TOML file were called before, and their names now."""


def _refuse_old_keys(table: Mapping[str, Any], path: Path) -> None:
    for old, new in OLD_KEYS.items():
        section, _, key = old.rpartition(".")
        found = table.get(section) if section else table
        if isinstance(found, dict) and key in found:
            raise UserError(f"{path}: {old} is called {new} now; rename it")


def _peer_id(text: str, field: str) -> str:
    try:
        public_key_of(text)
    except InvalidPeerId as error:
        raise UserError(f"{field}: {error}") from error
    return text


def struct_from_mapping(type_: type[StructT], table: Any, where: str) -> StructT:
    """Build a struct from a mapping by field name, refusing unknown keys; raises `UserError`."""
    if not isinstance(table, dict):
        raise UserError(f"{where} must be a table, not {type(table).__name__}")
    fields = {field.name: field for field in msgspec.structs.fields(type_)}
    for key in table:
        if key not in fields:
            raise UserError(f"{where}: unknown key {key!r}; there are: {', '.join(sorted(fields))}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        place = f"{where}: {name}"
        if name not in table:
            if field.required:
                raise UserError(f"{place} is missing")
            continue
        values[name] = _convert(field.type, table[name], place)
    return type_(**values)


def _convert(type_: Any, value: Any, where: str) -> Any:
    info = msgspec.inspect.type_info(type_)
    if isinstance(info, msgspec.inspect.StructType):
        return struct_from_mapping(info.cls, value, where)
    if isinstance(info, msgspec.inspect.ListType) and isinstance(
        info.item_type, msgspec.inspect.StructType
    ):
        if not isinstance(value, list):
            raise UserError(f"{where} must be a list, not {type(value).__name__}")
        if info.max_length is not None and len(value) > info.max_length:
            raise UserError(f"{where} has {len(value)} entries; {info.max_length} are the most")
        return [struct_from_mapping(info.item_type.cls, item, where) for item in value]
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise UserError(f"{where} is {value!r}: {error}") from error
