"""The owner's invites: made for links, and listed as the trusted peers' logs say who used them."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.owner.signing import owners_key
from swarm.errors import UserError
from swarm.ledger.archive import Archive
from swarm.ledger.entries import Redeemed, unfolded
from swarm.ledger.redeemed_invites import is_valid
from swarm.look.archives import fetch_archive
from swarm.node.local import visit
from swarm.run.invites import invite_in, make_invite
from swarm.run.manifest import load_manifest, run_id
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.output import print_json
from swarm.wire.envelope import Envelope
from swarm.wire.messages import Invite
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
    """Find the signed manifest that a TOML file, a manifest or a folder names; raises
    `UserError`."""
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
    """Make `count` tokens for a run that admits by invite; their ids are printed on standard error.

    `key`: the owner's; by default the one beside the manifest, else the user's.
    """
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
    made = [invite_in(token) for token in tokens]
    for each in made:
        print(f"invite {each.expect(Invite).id.hex()}", file=sys.stderr)
    print(
        f"until {_moment(made[0].body.expires_ms)}; each admits one peer, which may leave and "
        "return with its key",
        file=sys.stderr,
    )
    return tokens


def lifetime_seconds(text: str) -> float:
    """Parse a time such as `7d`; raises `UserError`."""
    match = re.fullmatch(r"(\d{1,4})([mhd])", text)
    if match is None or int(match[1]) == 0:
        raise UserError(f"--expires is {text!r}; write minutes, hours or days as 30m, 12h or 7d")
    return int(match[1]) * UNITS[match[2]]


def list_invites(run: OwnersRun, bootstrap: Sequence[str] | None, *, as_json: bool) -> None:
    """Print the invites that peers have redeemed, the earliest first."""
    id_, owners = run_id(run.manifest), ownership_of(run.manifest).owners
    archive = run_until_interrupted(_fetch, bootstrap, id_)
    if not any(log.size for log in archive.logs.values()):
        raise UserError(
            f"no trusted peer of {id_} has a log to read ({'; '.join(archive.problems)}); try "
            "again when its trainer or a validator runs"
        )
    holders: dict[str, Redeemed] = {}
    found = [
        entry
        for entry in unfolded(record.entry for record in archive.records)
        if isinstance(entry, Redeemed) and is_valid(entry, owners, id_)
    ]
    for entry in sorted(found, key=lambda each: (each.redeemed_ms, each.peer)):
        holders.setdefault(entry.invite.hex(), entry)  # of two peers the earlier has it
    if as_json:
        rows = [
            {"id": invite, "peer": each.peer, "redeemed_ms": each.redeemed_ms}
            for invite, each in holders.items()
        ]
        print_json({"run": id_, "invites": rows})
        return
    for invite, each in holders.items():
        print(f"{invite}  {_moment(each.redeemed_ms)}  {each.peer}")
    if not holders:
        print(f"no invite of {id_} was used yet; swarm run link makes them")


def _moment(wall_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(wall_ms / 1000))


async def _fetch(bootstrap: Sequence[str] | None, run: str) -> Archive:
    async with visit(bootstrap, run, looks_on=True) as (node, found):
        return await fetch_archive(node, found)
