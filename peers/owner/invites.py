"""The owner's invites, made for links."""

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from peers.owner.signing import owners_key
from swarm.errors import UserError
from swarm.run.invites import invite_in, make_invite
from swarm.run.manifest import load_manifest, run_id
from swarm.wire.envelope import Envelope
from swarm.wire.succession import ownership_of

UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}

COUNT_MAX = 1000
"""Most invites made by one command."""


@dataclass(frozen=True)
class OwnersRun:
    """A run's signed manifest, and where it is."""

    path: Path
    manifest: Envelope


def owners_run(place: Path) -> OwnersRun:
    """The signed manifest that a TOML file, manifest or folder names; raises `UserError`."""
    path = place.with_suffix(".manifest") if place.suffix == ".toml" else place
    if path != place and not path.exists():
        raise UserError(
            f"there is no signed manifest {path} of {place}; type swarm run create {place}, or "
            "name the manifest"
        )
    if path.is_dir():
        found = sorted(path.glob("*.manifest"))
        if len(found) != 1:
            names = ", ".join(each.name for each in found) or "none"
            raise UserError(
                f"{path} should have one signed manifest, and has {names}; name the run's "
                "TOML file or its manifest"
            )
        (path,) = found
    return OwnersRun(path, load_manifest(path))


def new_invites(run: OwnersRun, key: Path | None, *, expires: str, count: int) -> list[str]:
    """Tokens for a run that admits by invite; `key`: by default beside the manifest, or the
    user's."""
    if not 1 <= count <= COUNT_MAX:
        raise UserError(f"--count is {count}; it must be between 1 and {COUNT_MAX}")
    lifetime = lifetime_seconds(expires)
    beside = run.path.parent / "owner.key"
    owner = owners_key(
        ownership_of(run.manifest).owner, key or (beside if beside.exists() else None)
    )
    tokens = [
        make_invite(owner, run_id(run.manifest), wall_time=time.time(), lifetime_seconds=lifetime)
        for _ in range(count)
    ]
    until = time.gmtime(invite_in(tokens[0]).body.expires_ms / 1000)
    print(
        f"until {time.strftime('%Y-%m-%d %H:%M UTC', until)}; each admits one peer, which may "
        "leave and return with its key",
        file=sys.stderr,
    )
    return tokens


def lifetime_seconds(text: str) -> float:
    """Parse a time such as `7d`; raises `UserError`."""
    match = re.fullmatch(r"(\d{1,4})([mhd])", text)
    if match is None or int(match[1]) == 0:
        raise UserError(f"--expires is {text!r}; write minutes, hours or days as 30m, 12h or 7d")
    return int(match[1]) * UNITS[match[2]]
