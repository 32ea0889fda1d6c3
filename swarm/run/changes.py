"""Differences between two versions of a run manifest, and when each takes effect."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from swarm.data import beside
from swarm.wire.manifest import EnvironmentReference, RunManifest, TrustedKey

AT_ONCE = "at once"
NEXT_STEP = "from the next step"
NEVER = "not possible in a running run: start a new one"

_WHEN = {"at_once": AT_ONCE, "next_step": NEXT_STEP, "never": NEVER}

_TAKES_EFFECT = {
    field: _WHEN[when]
    for when, fields in beside(__file__, dict[str, list[str]]).items()
    for field in fields
}
"""When a change takes effect, by field of the manifest, from `changes.toml`."""

ITEMS_SHOWN = 4
"""Longest list that is shown in full; of a longer one (an allow-list), only its length is shown."""


@dataclass(frozen=True)
class Change:
    """One changed field, its values formatted for people."""

    field: str
    """Dotted name, such as `sampling.max_new_tokens` or `environments[0].weight`."""
    old: str
    new: str
    when: str
    """`AT_ONCE`, `NEXT_STEP` (the next step that is opened) or `NEVER`."""

    def __str__(self) -> str:
        return f"{self.field} {self.old} → {self.new} ({self.when})"


def changes(old: RunManifest, new: RunManifest) -> list[Change]:
    """The fields, without `version` and `delegation`, in which two versions differ, in order."""
    found = []
    for name in RunManifest.__struct_fields__:
        if name not in ("version", "delegation"):
            found += _changed(name, getattr(old, name), getattr(new, name))
    return found


def values_listed(found: Sequence[Change]) -> str:
    """List old and new values in one line."""
    return "; ".join(f"{each.field} {each.old} → {each.new}" for each in found)


def _changed(field: str, old: Any, new: Any) -> list[Change]:
    if old == new:
        return []
    if isinstance(old, msgspec.Struct):
        return [
            change
            for name in old.__struct_fields__
            for change in _changed(f"{field}.{name}", getattr(old, name), getattr(new, name))
        ]
    if _are_environments(old) and _are_environments(new) and len(old) == len(new):
        return [
            change
            for index, pair in enumerate(zip(old, new, strict=True))
            for change in _changed(f"{field}[{index}]", *pair)
        ]
    if field == "successors" and old:
        return [Change(field, _shown(old), _shown(new), NEVER)]
    field_of_any = re.sub(r"\[\d+\]", "", field)
    when = _TAKES_EFFECT.get(field_of_any) or _TAKES_EFFECT[field_of_any.partition(".")[0]]
    return [Change(field, _shown(old), _shown(new), when)]


def _are_environments(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], EnvironmentReference)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        if len(value) > ITEMS_SHOWN:
            return f"{len(value)} entries"
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, EnvironmentReference):
        return f"{value.name} {value.version}"
    if isinstance(value, TrustedKey):
        return value.peer + (
            f" (from version {value.from_version})" if value.from_version > 1 else ""
        )
    if isinstance(value, bytes):
        return value.hex()[:16] or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
