"""Every alarm: how bad it is, which events raise and clear it, and what to do (docs/alarms.md)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

Severity = Literal["warn", "page"]
"""warn: look at it today. page: the run stands still, or is in danger."""

MINUTE = 60.0


@dataclass(frozen=True)
class Kind:
    """One alarm of the catalogue."""

    severity: Severity
    when: str
    """When it is raised, for the documentation."""
    do: str
    """What a person can do."""
    signs: int = 1
    """Signs within `within_seconds` that raise it."""
    within_seconds: float = 10 * MINUTE
    quiet_seconds: float = 10 * MINUTE
    """Time without a sign after which it is cleared."""
    events: tuple[str, ...] = ()
    """Events that are signs by themselves; `raising` knows the signs that depend on figures."""
    over: tuple[str, ...] = ()
    """Events that prove that its cause is gone."""


CATALOGUE = msgspec.convert(
    tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")), dict[str, Kind]
)
"""By name, from `catalogue.toml`."""
