"""`docs/settings.md`, made from the models: `python -m tests.docs.settings_page` writes it."""

from __future__ import annotations

import inspect
import json
from importlib.metadata import entry_points
from typing import Any, get_args, get_origin

import pydantic
from pydantic_core import PydanticUndefined

from swarm.data import beside
from swarm.settings import ROLE_GROUP, AlarmSettings, PeerSettings, RoleSettings
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "settings.md"
HIDDEN = {"alarms", "tables"}
"""Fields that are no keys: tables have sections of their own."""

HEAD = """# Settings

What a person may set for one peer, in the TOML file of `--config`. Many keys of the first table are flags of `swarm peer` too; a flag wins. `swarm peer`, `join`, `doctor` and `demo` take any of them on the line: `--set NAME=VALUE`, and of another table `--set TABLE.NAME=VALUE`, as often as you like (`--set uplink_mbps=20 --set inference.device=cuda:1`; a list as in TOML, `--set 'environments=["harness"]'`). An unknown key or wrong value is reported in one sentence before anything starts. This page is made from the program: `python -m tests.docs.settings_page`.

```toml
role = ["trainer"]
home = "/data/trainer"

[trainer]
model = "base"
device = "cuda"
```
"""  # noqa: E501 (a paragraph is a line)


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## The peer\n", _table(PeerSettings)]
    parts += ["## `[alarms]`\n", _table(AlarmSettings)]
    for name, model in role_models().items():
        parts += [f"## `[{name}]`\n", _table(model)]
    parts.append("Roles that are not listed have no settings.\n")
    return "\n".join(parts)


def role_models() -> dict[str, type[RoleSettings]]:
    """The settings of the roles that come with Swarm and have some."""
    found = {}
    for entry in sorted(entry_points(group=ROLE_GROUP), key=lambda entry: entry.name):
        if entry.value.startswith("peers."):
            model = getattr(entry.load(), "Settings", None)
            if model is not None:
                found[entry.name] = model
    return found


def _table(model: type[pydantic.BaseModel]) -> str:
    meanings = _meanings(model)
    rows = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name not in HIDDEN:
            words = (_words(field.annotation), _default(field.default), meanings[name])
            rows.append(f"| {name} | {' | '.join(words)} |")
    return "\n".join(rows) + "\n"


def _meanings(model: type[pydantic.BaseModel]) -> dict[str, str]:
    """What each field means, by name: from the TOML files beside the modules of the models."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, pydantic.BaseModel) and base is not pydantic.BaseModel:
            own = inspect.get_annotations(base).keys()
            if not own:
                continue
            tables = beside(inspect.getfile(base), dict[str, dict[str, str]])
            assert tables[base.__name__].keys() == own, base.__name__
            found |= tables[base.__name__]
    return found


def _words(annotation: Any) -> str:
    arguments = get_args(annotation)
    if get_origin(annotation) is list:
        return f"list of {_words(arguments[0])}"
    if type(None) in arguments:
        return _words(arguments[0])
    if arguments:
        return " or ".join(f"`{choice}`" for choice in arguments)
    return {str: "text", bool: "bool", int: "int", float: "float"}[annotation]


def _default(value: Any) -> str:
    if value in (None, "", [], PydanticUndefined):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`"
    if isinstance(value, list):
        return f"`{json.dumps(value)}`"
    return f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
