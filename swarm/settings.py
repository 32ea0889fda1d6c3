"""What a person may set for one peer: flags of `python -m swarm.peer`, or the same in TOML.

Each role has a table of its own, whose model the role's class gives (`swarm.roles`).
"""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic

from swarm.errors import UserError
from swarm.jobs import Hardware

ROLE_GROUP = "swarm.roles"
"""Entry points of the roles, by name."""


class RoleSettings(pydantic.BaseModel):
    """Base of the settings of one role."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class ComputeSettings(RoleSettings):
    """Base of the settings of a role that computes in a child process."""

    device: str = "auto"
    """Torch device: `cpu`, `cuda` or `cuda:N`. auto: cuda where there is one, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision to compute in. auto: bfloat16 on cuda, float32 on a CPU."""
    threads: int = pydantic.Field(default=1, ge=1, le=1024)
    """CPU threads of the child. Peers that share cores are slower with more than one each."""
    interpreter: str = ""
    """Path of another Python that the child runs under, such as a virtual environment of its own
    with Swarm and an engine in it; empty: this one."""

    @property
    def hardware(self) -> Hardware:
        """What the child's service computes on."""
        return Hardware(device=self.device, dtype=self.dtype, threads=self.threads)


RoleSettingsT = TypeVar("RoleSettingsT", bound=RoleSettings)


class PeerSettings(pydantic.BaseModel):
    """One peer's settings. Keys of the TOML file are the fields' names."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    role: list[str] = ["inference"]
    """What this peer does in the run."""
    bootstrap: list[str] = []
    """Multiaddrs of peers that know the network, each ending in `/p2p/<peer id>`."""
    listen: list[str] = ["/ip4/0.0.0.0/tcp/0"]
    """Multiaddrs to listen on; port 0 lets the system choose."""
    bulk_port: int = pydantic.Field(default=0, ge=0, le=65535)
    """TCP port of the piece plane; 0 lets the system choose."""
    uplink_mbps: float | None = pydantic.Field(default=None, gt=0)
    """Most that the piece plane sends, in megabits a second; unset, what the network takes."""
    home: str = "~/.swarm"
    """Keys and state; made with mode 0700."""
    run: str | None = None
    """Id of the run to take part in, where the network knows several."""
    manifest: list[str] = []
    """Files with signed run manifests to know from the start (and to hand out)."""
    engine: str = "native"
    """Engine that generates and prefills."""
    resume: bool = False
    """Trainer: continue from the newest state in the home."""
    verbose: bool = False
    """Show every event."""
    json_logs: bool = False
    """Write events as JSON lines."""
    status_seconds: float = pydantic.Field(default=1.0, gt=0)
    """Between `peer.status` events while nothing but traffic changes."""
    quota_bytes: int | None = pydantic.Field(default=None, ge=0)
    """Most that the home may hold; unset, the disk's free space decides."""
    tables: dict[str, dict[str, Any]] = {}
    """The roles' tables as they were read, by role; in TOML each is a table of its own."""

    @property
    def home_path(self) -> Path:
        return Path(self.home).expanduser()

    def of(self, role: str, model: type[RoleSettingsT]) -> RoleSettingsT:
        """One role's settings; raises `UserError` naming the table, the key and the value."""
        return _validated(model, self.tables.get(role, {}), f"settings of [{role}]")


def load_settings(config: Path | None, flags: dict[str, Any]) -> PeerSettings:
    """Settings from a TOML file, overruled by flags (those not None or empty).

    Raises `UserError` naming the key, the value and what would be right.
    """
    table: dict[str, Any] = {}
    where = f"--config {config}" if config is not None else "settings"
    if config is not None:
        try:
            table = tomllib.loads(config.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"--config {config} cannot be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"--config {config} is not valid TOML: {error}") from error
    if "options" in table:
        raise UserError(
            f'{where}: [options] has become a table for each role; write "trainer.model" as model '
            "under [trainer]"
        )
    roles = entry_points(group=ROLE_GROUP).names
    tables = {key: value for key, value in table.items() if key in roles and _is_table(value)}
    known = {*PeerSettings.model_fields, *(f"[{role}]" for role in roles)} - {"tables"}
    for key in table:
        if key not in tables and (key not in PeerSettings.model_fields or key == "tables"):
            raise UserError(f"{where}: unknown key {key!r}; there are: {', '.join(sorted(known))}")
    rest = {key: value for key, value in table.items() if key not in tables}
    rest |= {key: value for key, value in flags.items() if value not in (None, [], False)}
    return _validated(PeerSettings, {**rest, "tables": tables}, where)


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)


def _validated(model: type[ModelT], table: dict[str, Any], where: str) -> ModelT:
    try:
        return model.model_validate(table)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(model.model_fields))
            raise UserError(f"{where}: unknown key {key!r}; there are: {known}") from error
        raise UserError(f"{where}: {key} is {first['input']!r}: {first['msg'].lower()}") from error
