"""Settings of one peer: flags of `python -m swarm.peer`, or the same keys in TOML.

Each role has a table of its own. The role's class names the table's model (`swarm.roles`)."""

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
    """Peers behind NAT that the relay serves at once."""
    carry_mbps: float | None = pydantic.Field(default=None, gt=0)
    """Limit on all carried connections together in megabits per second; no limit if unset."""


class ComputeSettings(RoleSettings):
    """Base of the settings of a role that computes in a child process."""

    device: str = "auto"
    """Torch device: `cpu`, `cuda` or `cuda:N`. auto: cuda if the machine has it, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the computation. auto: bfloat16 on a GPU that has it (NVIDIA since Ampere), and
    on a CPU with AMX where the run's thresholds were measured for it (of a trainer: where the model
    is stored in it), else float32."""
    threads: int = pydantic.Field(default=1, ge=1, le=1024)
    """CPU threads of the child. Peers that share cores run slower with more than one each."""
    environments: list[str] = []
    """As the peer's `environments`: those that a run may build here although they could run
    programs or read files."""
    interpreter: str = ""
    """Path of the Python interpreter of the children, for example in a virtual environment with
    Swarm and an engine. Empty: the peer's own interpreter."""

    @property
    def hardware(self) -> Hardware:
        """The hardware settings of the child's service."""
        return Hardware(device=self.device, dtype=self.dtype, threads=self.threads)


RoleSettingsT = TypeVar("RoleSettingsT", bound=RoleSettings)


def from_line(
    role: str, kind: type[RoleSettingsT], given: Sequence[str], fields: Mapping[str, Any]
) -> RoleSettingsT:
    """A role's settings from `fields` and from a command's --set NAME=VALUE; raises `UserError`."""
    table = dict(fields)
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise UserError(f"--set is {each!r}; write it as NAME=VALUE")
        try:
            table[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:  # a text needs no quotes
            table[name] = value
    return PeerSettings(tables={role: table}).of(role, kind)


class AlarmSettings(RoleSettings):
    """The table `[alarms]`: from which figures on they ring."""

    starved_seconds: float = pydantic.Field(default=600.0, gt=0)
    """Time without work from which on a peer is starved."""
    no_step_seconds: float = pydantic.Field(default=1800.0, gt=0)
    """Time without a finished step from which on a run stands still."""
    disk_free_share: float = pydantic.Field(default=0.05, ge=0, le=1)
    """Free share of the home's disk below which the disk is low."""


class PeerSettings(pydantic.BaseModel):
    """Settings of one peer. The field names are the keys of the TOML file."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    role: list[str] = ["inference"]
    """Roles of this peer in the run."""
    bootstrap: list[str] = []
    """Multiaddrs of peers that know the network, each ending in `/p2p/<peer id>`. All are
    tried side by side."""
    listen: list[str] = []
    """Multiaddrs to listen on; port 0 lets the system choose. Empty: a port of IPv4, and one of
    IPv6 where this machine has a global address."""
    announce: list[str] = []
    """Multiaddrs to announce beside the detected ones: a forwarded port or a DNS name, such as
    `/ip4/192.0.2.7/tcp/4001`."""
    announce_bulk: list[str] = []
    """Roots of the piece plane to announce beside the detected ones, such as
    `http://192.0.2.7:4002`."""
    announce_detected: bool = True
    """Announce the addresses of this machine's interfaces, and those at which others reached it."""
    bulk_port: int = pydantic.Field(default=0, ge=0, le=65535)
    """TCP port of the piece plane; 0 lets the system choose."""
    uplink_mbps: float | None = pydantic.Field(default=None, gt=0)
    """Upload limit of the piece plane in megabits per second; no limit if unset."""
    home: str = "~/.swarm"
    """Folder of keys and state; created with mode 0700. `.` in a file: the folder of the file."""
    invite: str = ""
    """Invite of the run's owner, for a run that admits by invite."""
    run: str | None = None
    """Id of the run to join if the network has several."""
    manifest: list[str] = []
    """Files with signed run manifests that the peer knows from the start and hands out."""
    environments: list[str] = []
    """Environments that a run may build here with options of its own although they could run
    programs or read files, such as `["harness"]`. Name one only if you trust the run's owner."""
    engine: str = "native"
    """Engine that generates and prefills."""
    resume: bool = False
    """Trainer: continue from the newest state in the home."""
    new_log: bool = False
    """Trainer or validator that has never taken part in its run: begin its log without waiting for
    the other trusted peers to say that they have no copy. After a lost disk this forks the log."""
    verbose: bool = False
    """Show every event."""
    json_logs: bool = False
    """Write events as JSON lines."""
    status_seconds: float = pydantic.Field(default=1.0, gt=0)
    """Seconds between `peer.status` events while only traffic counts change."""
    metrics: str = ""
    """host:port at which Prometheus reads this peer's figures, such as `127.0.0.1:9464`. Empty:
    none."""
    metrics_key_file: str = ""
    """File with the keys that scrapers send, one a line. Needed unless `metrics` is this
    machine."""
    region: str = pydantic.Field(default="", pattern=r"^[a-z0-9-]{0,24}$")
    """Where this peer is, in a word such as `eu-west`: shown beside it, for people."""
    quota_bytes: int | None = pydantic.Field(default=None, ge=0)
    """Largest size of the home in bytes; if unset, the disk's free space is the limit."""
    alarms: AlarmSettings = AlarmSettings()
    """Whom to tell when something goes wrong: a table of its own."""
    tables: dict[str, dict[str, Any]] = {}
    """Unvalidated tables of the roles, by role; in TOML each is a table of its own."""

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


def load_settings(config: Path | None, flags: dict[str, Any]) -> PeerSettings:
    """Load the settings from a TOML file; flags that are set overrule it.

    A flag is unset if it is None, False or an empty list. Raises a `UserError` that names the key,
    its value and what is allowed."""
    where = f"--config {config}" if config is not None else "settings"
    table = read_toml(config, where) if config is not None else {}
    roles = entry_points(group=ROLE_GROUP).names
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
        raise UserError(f"{where}: {key} is {first['input']!r}: {first['msg'].lower()}") from error
