"""Reading the Markdown pages: their tables and their code."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

ROOT = Path(__file__).parents[2]


def text(name: str) -> str:
    """A page, by its path from the top of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """What stands under one heading, up to the next of the same or a higher level."""
    match = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,6}} |\Z)", page, re.M | re.S)
    assert match is not None, f"no heading {heading!r}"
    return match[2]


def table(part: str) -> list[list[str]]:
    """The cells of the first table's body."""
    match = re.search(r"(?:^\|.*\n)+", part, re.M)
    assert match is not None, "no table"
    lines = match[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


@dataclass(frozen=True)
class Written:
    """A part of a page that a program writes, between two comments."""

    page: Path
    begin: str
    end: str

    def shown(self) -> str:
        """What the page has."""
        return self.page.read_text(encoding="utf-8").split(self.begin)[1].split(self.end)[0]

    def write(self, part: str) -> None:
        before, rest = self.page.read_text(encoding="utf-8").split(self.begin)
        whole = f"{before}{self.begin}{part}{self.end}{rest.split(self.end)[1]}"
        self.page.write_text(whole, encoding="utf-8")


# --- what a message's fields are, in words -----------------------------------------------------

PEER_ID_LENGTHS = (46, 64)
"""Of `swarm.wire.messages.Key`."""


def field_rows(struct: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    """(name, type and bounds, default) of every field, in wire order."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return [(field.name, type_words(field.type), _default(field)) for field in info.fields]


def type_words(info: Any) -> str:
    """A type and its bounds, as the pages write them."""
    if isinstance(info, inspect.StructType):
        return info.cls.__name__
    if isinstance(info, inspect.LiteralType):
        return " or ".join(f"`{value}`" for value in sorted(map(str, info.values)))
    if isinstance(info, inspect.ListType):
        return f"array{_lengths(info)} of {type_words(info.item_type)}"
    if isinstance(info, inspect.BytesType):
        if info.min_length is not None and info.min_length == info.max_length:
            return f"{info.min_length} bytes"
        return f"bytes{_lengths(info)}"
    if isinstance(info, inspect.StrType):
        if (info.min_length, info.max_length) == PEER_ID_LENGTHS:
            return "peer id"
        pattern = f" `{info.pattern}`" if info.pattern else ""
        return f"text{_lengths(info)}{pattern}"
    if isinstance(info, inspect.IntType):
        return f"int{_range(info)}"
    if isinstance(info, inspect.FloatType):
        largest = sys.float_info.max  # every float is finite, which the page says once
        return f"float{'' if (info.ge, info.le) == (-largest, largest) else _range(info)}"
    if isinstance(info, inspect.UnionType):
        return " or ".join(map(type_words, info.types))
    if isinstance(info, inspect.DictType):
        key, value = type_words(info.key_type), type_words(info.value_type)
        return f"map{_lengths(info)} of {key} to {value}"
    if isinstance(info, inspect.TupleType):
        return f"({', '.join(map(type_words, info.item_types))})"
    if isinstance(info, inspect.NoneType):
        return "nil"
    assert isinstance(info, inspect.BoolType), info
    return "bool"


def _lengths(info: Any) -> str:
    if info.max_length is None:
        return ""
    return f" [{info.min_length or 0}, {info.max_length}]"


def _range(info: Any) -> str:
    if (info.ge, info.gt, info.le, info.lt) == (None, None, None, None):
        return ""
    low = "(−∞"
    if info.ge is not None:
        low = f"[{_number(info.ge)}"
    elif info.gt is not None:
        low = f"({_number(info.gt)}"
    endless = info.lt is None and info.le in (None, sys.float_info.max)
    below = f"{_number(info.le)}]" if info.lt is None else f"{_number(info.lt)})"
    high = "∞)" if endless else below
    return f" {low}, {high}"


def _number(value: float) -> str:
    if value == 2**53:
        return "2^53"
    power = int(value).bit_length() - 1
    return f"2^{power}" if value == 2**power and power > 12 else f"{value:g}"


def _default(field: Any) -> str:
    if field.required:
        return ""
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if value is None:
        return "nil"
    if isinstance(value, msgspec.Struct):
        return "its defaults"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return "empty"
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, list):
        return "[]"
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    return str(value) if isinstance(value, int) else f"{value:g}"
