"""Tables that people write, in TOML, as typed structures; an error is one sentence."""

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from swarm.errors import UserError, file_errors


def read_toml(path: Path, where: str) -> dict[str, Any]:
    """Read a TOML file. Raises a `UserError` that begins with `where`."""
    try:
        with file_errors(where):
            return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{where} is not valid TOML: {error}") from error


StructT = TypeVar("StructT", bound=msgspec.Struct)


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
        return [
            struct_from_mapping(info.item_type.cls, item, f"{where}[{index}]")
            for index, item in enumerate(value)
        ]
    if isinstance(info, msgspec.inspect.LiteralType) and value not in info.values:
        known = ", ".join(map(str, info.values))
        raise UserError(f"{where} is {value!r:.200}; it must be one of {known}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where} is {value}; it must be a finite number")
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise UserError(f"{where} is {value!r:.200}: {error}") from error


def option_texts(options: Mapping[str, Any]) -> dict[str, Any]:
    """An environment's options as in a manifest; a table is texts `name=value`, values in JSON."""
    return {
        key: [
            f"{n}={json.dumps(each, ensure_ascii=False, default=str)}" for n, each in value.items()
        ]
        if isinstance(value, dict)
        else value
        for key, value in options.items()
    }
