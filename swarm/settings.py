"""What a person may set for one peer: flags of `python -m swarm.peer`, or the same in TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pydantic

from swarm.errors import UserError


class PeerSettings(pydantic.BaseModel):
    """One peer's settings. Keys of the TOML file are the fields' names."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    role: list[str] = ["inference"]
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
    manifest: list[str] = []
    """Files with signed run manifests to know from the start (and to hand out)."""
    engine: str = "native"
    resume: bool = False
    verbose: bool = False
    json_logs: bool = False
    status_seconds: float = pydantic.Field(default=1.0, gt=0)
    """Between `peer.status` events while nothing but traffic changes."""
    quota_bytes: int | None = pydantic.Field(default=None, ge=0)
    """Most that the home may hold; unset, the disk's free space decides."""
    options: dict[str, Any] = {}
    """What single roles read, by `role.name` (documented with the role)."""

    @property
    def home_path(self) -> Path:
        return Path(self.home).expanduser()


def load_settings(config: Path | None, flags: dict[str, Any]) -> PeerSettings:
    """Settings from a TOML file, overruled by flags (those not None or empty).

    Raises `UserError` naming the key, the value and what would be right.
    """
    table: dict[str, Any] = {}
    if config is not None:
        try:
            table = tomllib.loads(config.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"--config {config} cannot be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"--config {config} is not valid TOML: {error}") from error
    table |= {key: value for key, value in flags.items() if value not in (None, [], False)}
    try:
        return PeerSettings.model_validate(table)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        where = f"--config {config}" if config is not None else "settings"
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(PeerSettings.model_fields))
            raise UserError(f"{where}: unknown key {key!r}; there are: {known}") from error
        raise UserError(f"{where}: {key} is {first['input']!r}: {first['msg'].lower()}") from error
