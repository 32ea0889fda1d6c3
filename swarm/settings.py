"""Settings of one peer: flags of `swarm peer`, or the same keys in TOML.

Each role has a table of its own. The role's class names the table's model (`swarm.roles`). What the
settings mean lies in `settings.toml`, as beside each module with a model (decision 72)."""

import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import pydantic

from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.terminal.tables import read_toml

ROLE_GROUP = "swarm.roles"
"""Group of the roles' entry points."""

BOOTSTRAP = "bootstrap"
"""The only role that needs no run: it serves the DHT and hands out manifests."""


StructT = TypeVar("StructT", bound=msgspec.Struct)


class RoleSettings(pydantic.BaseModel):
    """Base of the settings of one role."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    def filled(self, kind: type[StructT], **given: Any) -> StructT:
        """A structure with the settings of its fields' names, except for the fields given."""
        own = type(self).model_fields.keys() & kind.__struct_fields__
        return kind(**{name: getattr(self, name) for name in own} | given)


class RelaySettings(RoleSettings):
    """Limits on the connections that a relay carries for peers behind NAT."""

    reservations: int = pydantic.Field(default=128, ge=1)
    carry_mbps: float | None = pydantic.Field(default=None, gt=0)


class ComputeSettings(RoleSettings):
    """Base of the settings of a role that computes in a child process."""

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int = pydantic.Field(default=1, ge=1, le=1024)
    environments: list[str] = []
    interpreter: str = ""

    @property
    def hardware(self) -> Hardware:
        """The hardware settings of the child's service."""
        return Hardware(device=self.device, dtype=self.dtype, threads=self.threads)


RoleSettingsT = TypeVar("RoleSettingsT", bound=RoleSettings)


def from_line(
    role: str, kind: type[RoleSettingsT], given: Sequence[str], fields: Mapping[str, Any]
) -> RoleSettingsT:
    """A role's settings from `fields` and from a command's --set, which may leave out the role in
    ROLE.NAME=VALUE; raises `UserError`."""
    own = {name.removeprefix(f"{role}."): value for name, value in values_of(given).items()}
    return PeerSettings(tables={role: {**fields, **own}}).of(role, kind)


def values_of(given: Sequence[str]) -> dict[str, Any]:
    """The values of a command's --set NAME=VALUE by name; raises `UserError`."""
    found: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise UserError(f"--set is {each!r}; write it as NAME=VALUE")
        try:
            found[name] = tomllib.loads(f"value = {value}")["value"]
        except ValueError:  # a text needs no quotes
            found[name] = value
    return found


class AlarmSettings(RoleSettings):
    """The table `[alarms]`: from which figures on they ring."""

    starved_seconds: float = pydantic.Field(default=600.0, gt=0)
    no_step_seconds: float = pydantic.Field(default=1800.0, gt=0)
    disk_free_share: float = pydantic.Field(default=0.05, ge=0, le=1)


class PeerSettings(pydantic.BaseModel):
    """Settings of one peer. The field names are the keys of the TOML file."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    role: list[str] = ["inference"]
    bootstrap: list[str] = []
    listen: list[str] = []
    announce: list[str] = []
    announce_bulk: list[str] = []
    announce_detected: bool = True
    bulk_port: int = pydantic.Field(default=0, ge=0, le=65535)
    uplink_mbps: float | None = pydantic.Field(default=None, gt=0)
    home: str = "~/.swarm"
    invite: str = ""
    run: str | None = None
    manifest: list[str] = []
    environments: list[str] = []
    engine: str = "native"
    resume: bool = False
    new_log: bool = False
    verbose: bool = False
    json_logs: bool = False
    status_seconds: float = pydantic.Field(default=1.0, gt=0)
    metrics: str = ""
    metrics_key_file: str = ""
    region: str = pydantic.Field(default="", pattern=r"^[a-z0-9-]{0,24}$")
    quota_bytes: int | None = pydantic.Field(default=None, ge=0)
    alarms: AlarmSettings = AlarmSettings()
    tables: dict[str, dict[str, Any]] = {}

    @property
    def home_path(self) -> Path:
        return Path(self.home).expanduser()

    @property
    def allowed(self) -> list[str]:
        """The environments that this peer or the table of a role names in `environments`."""
        named = [self.environments]
        named += [each.get("environments", []) for each in self.tables.values()]
        return sorted({str(name) for names in named if isinstance(names, list) for name in names})

    def of(self, role: str, model: type[RoleSettingsT]) -> RoleSettingsT:
        """Validate one role's settings. Raises a `UserError` that names table, key and value."""
        return _validated(model, self.tables.get(role, {}), f"settings of [{role}]")


def load_settings(
    config: Path | None, flags: dict[str, Any], given: Sequence[str] = ()
) -> PeerSettings:
    """Load the settings from a TOML file; flags that are set overrule it, and so does `given`,
    texts NAME=VALUE or TABLE.NAME=VALUE.

    A flag is unset if it is None, False or an empty list. Raises a `UserError` that names the key,
    its value and what is allowed."""
    where = f"--config {config}" if config is not None else "settings"
    table = read_toml(config, where) if config is not None else {}
    roles = entry_points(group=ROLE_GROUP).names
    for name, value in values_of(given).items():
        head, _, last = name.rpartition(".")
        if not head:
            table[name] = value
        elif head in roles or head == "alarms":
            held = table.get(head)
            table[head] = {**(held if isinstance(held, dict) else {}), last: value}
        else:
            listed = ", ".join(sorted([*roles, "alarms"]))
            raise UserError(f"--set {name} is of no table; there are: {listed}")
    tables = {
        key: value for key, value in table.items() if key in roles and isinstance(value, dict)
    }
    known = {*PeerSettings.model_fields, *(f"[{role}]" for role in roles)} - {"tables"}
    for key in table:
        if key not in tables and (key not in PeerSettings.model_fields or key == "tables"):
            raise UserError(f"{where}: unknown key {key!r}; there are: {', '.join(sorted(known))}")
    rest = {key: value for key, value in table.items() if key not in tables}
    if config is not None and rest.get("home") == ".":
        rest["home"] = str(config.absolute().parent)
    rest |= {key: value for key, value in flags.items() if value not in (None, [], False)}
    rest["alarms"] = _validated(AlarmSettings, rest.get("alarms", {}), f"{where}: [alarms]")
    return _validated(PeerSettings, {**rest, "tables": tables}, where)


ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)


def _validated(model: type[ModelT], table: dict[str, Any], where: str) -> ModelT:
    try:
        return model.model_validate(table)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(model.model_fields)) or "none"
            raise UserError(f"{where}: unknown key {key!r}; there are: {known}") from error
        example = f", such as [{first['input']!r}]" if first["type"] == "list_type" else ""
        raise UserError(
            f"{where}: {key} is {first['input']!r}: {first['msg'].lower()}{example}"
        ) from error
