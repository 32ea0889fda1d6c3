"""The owner's invites: made, listed, revoked.

A file beside the signed manifest records which invites were made. The trusted peers' logs say which
of them were redeemed or revoked.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from peers.owner.signing import owners_key
from swarm.errors import UserError
from swarm.ledger.client import LedgerClient, fetch_log
from swarm.ledger.entries import InviteRevoked, Redeemed, unfolded
from swarm.ledger.redeemed_invites import is_valid
from swarm.look.onlooker import ask_all
from swarm.node.local import visit
from swarm.run.invites import TOKEN_PREFIX, invite_in, make_invite, revoke
from swarm.run.manifest import load_manifest, manifest_in, run_id
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.output import print_json
from swarm.wire.envelope import Envelope
from swarm.wire.identity import Identity
from swarm.wire.messages import INVITE_ID_BYTES, Invite
from swarm.wire.succession import ownership_of

UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}

COUNT_MAX = 1000
"""Most invites made by one command."""


class Made(msgspec.Struct, frozen=True):
    """One line of the file of invites."""

    id: str
    expires_ms: int


@dataclass(frozen=True)
class OwnersRun:
    """A run's signed manifest, and the files beside it."""

    path: Path
    manifest: Envelope

    @property
    def made(self) -> Path:
        """The file that lists the invites made."""
        return self.path.with_suffix(".invites")

    def key(self, given: Path | None) -> Identity:
        """Read the owner's key: the one given, one beside the manifest, or the default one."""
        beside = self.path.parent / "owner.key"
        chosen = given or (beside if beside.exists() else None)
        return owners_key(ownership_of(self.manifest).owner, chosen)


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


def make_invites(run: OwnersRun, key: Path | None, *, expires: str, count: int) -> None:
    """Print `count` new tokens, one a line, and record their ids."""
    for token in new_invites(run, key, expires=expires, count=count):
        print(token)


def new_invites(run: OwnersRun, key: Path | None, *, expires: str, count: int) -> list[str]:
    """Make `count` tokens and record their ids, which are printed on standard error."""
    policy = manifest_in(run.manifest).admissions.policy
    if policy != "invite":
        raise UserError(
            f"{run.path}: admissions.policy is {policy!r}, so an invite would admit nobody; make "
            'it "invite", raise version and sign with swarm run update'
        )
    if not 1 <= count <= COUNT_MAX:
        raise UserError(f"--count is {count}; it must be between 1 and {COUNT_MAX}")
    lifetime = lifetime_seconds(expires)
    owner = run.key(key)
    tokens = [
        make_invite(owner, run_id(run.manifest), wall_time=time.time(), lifetime_seconds=lifetime)
        for _ in range(count)
    ]
    made = [invite_in(token) for token in tokens]
    with run.made.open("ab") as file:
        for each in made:
            line = Made(each.expect(Invite).id.hex(), each.body.expires_ms)
            file.write(msgspec.json.encode(line) + b"\n")
    for each in made:
        print(f"invite {each.expect(Invite).id.hex()}", file=sys.stderr)
    print(
        f"until {_moment(made[0].body.expires_ms)}; each admits one peer, started with "
        "--invite TOKEN or by a link",
        file=sys.stderr,
    )
    return tokens


def lifetime_seconds(text: str) -> float:
    """Parse a time such as `7d`; raises `UserError`."""
    match = re.fullmatch(r"(\d{1,4})([mhd])", text)
    if match is None or int(match[1]) == 0:
        raise UserError(f"--expires is {text!r}; write minutes, hours or days as 30m, 12h or 7d")
    return int(match[1]) * UNITS[match[2]]


def revoke_invite(
    run: OwnersRun, key: Path | None, named: str, bootstrap: Sequence[str] | None
) -> None:
    """Revoke one invite, named by its id or its token, at all trusted peers that answer."""
    invite = _id_of(named)
    revocation = revoke(run.key(key), run_id(run.manifest), invite, time.time())

    async def hand_over(client: LedgerClient) -> None:
        await client.revoke_invite(revocation)

    logged = run_until_interrupted(_ask_trusted, run, bootstrap, hand_over)
    print(f"invite {invite.hex()} is revoked: in the log of {', '.join(logged)}")


def list_invites(run: OwnersRun, bootstrap: Sequence[str] | None, *, as_json: bool) -> None:
    """Print the invites that were made here or redeemed or revoked, with their use."""
    redeemed: list[Redeemed] = []
    revoked: set[str] = set()

    async def read(client: LedgerClient) -> None:
        records = await fetch_log(client)
        for entry in unfolded(record.entry for record in records):
            if not isinstance(entry, (Redeemed, InviteRevoked)) or not is_valid(
                entry, ownership_of(run.manifest).owners, run_id(run.manifest)
            ):
                continue
            if isinstance(entry, Redeemed):
                redeemed.append(entry)
            else:
                revoked.add(entry.invite.hex())

    run_until_interrupted(_ask_trusted, run, bootstrap, read)
    earliest = sorted(redeemed, key=lambda each: (each.redeemed_ms, each.peer), reverse=True)
    holders = {each.invite.hex(): each.peer for each in earliest}
    expiry = {each.id: each.expires_ms for each in _made(run)}
    rows: list[dict[str, Any]] = []
    for invite in sorted({*expiry, *holders, *revoked}, key=lambda each: expiry.get(each, 0)):
        ends = expiry.get(invite)
        state = "revoked" if invite in revoked else "used" if invite in holders else "unused"
        if state == "unused" and ends is not None and ends <= time.time() * 1000:
            state = "expired"
        rows.append({"id": invite, "state": state, "expires_ms": ends, "peer": holders.get(invite)})
    if as_json:
        print_json({"run": run_id(run.manifest), "invites": rows})
        return
    for row in rows:
        until = _moment(row["expires_ms"]) if row["expires_ms"] else "made elsewhere"
        print(f"{row['id']}  {row['state']:<7}  {until:<20}  {row['peer'] or ''}".rstrip())
    if not rows:
        print(f"no invite of {run_id(run.manifest)} was made; swarm run invite makes one")


def _made(run: OwnersRun) -> list[Made]:
    with suppress(FileNotFoundError):
        lines = run.made.read_bytes().splitlines()
        try:
            return [msgspec.json.decode(line, type=Made) for line in lines]
        except msgspec.MsgspecError as error:
            raise UserError(f"{run.made} is damaged ({error}); remove the wrong line") from error
    return []


def _id_of(named: str) -> bytes:
    if named.startswith(TOKEN_PREFIX):
        return invite_in(named).expect(Invite).id
    try:
        invite = bytes.fromhex(named)
    except ValueError:
        invite = b""
    if len(invite) != INVITE_ID_BYTES:
        raise UserError(
            f"{named[:80]!r} is neither an invite's id nor its token; swarm run invites lists ids"
        )
    return invite


def _moment(wall_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(wall_ms / 1000))


async def _ask_trusted(
    run: OwnersRun,
    bootstrap: Sequence[str] | None,
    ask: Callable[[LedgerClient], Awaitable[None]],
) -> list[str]:
    """Ask every trusted peer; returns those that answered. Raises `UserError` if none did."""
    answered: list[str] = []
    problems: list[str] = []

    async def note(client: LedgerClient) -> None:
        await ask(client)
        answered.append(client.peer)

    async with visit(bootstrap, run_id(run.manifest), looks_on=True) as (node, found):
        await ask_all(node, found.manifest.trusted_ids(), note, problems)
    if not answered:
        raise UserError(
            f"no trusted peer of {run_id(run.manifest)} answered ({'; '.join(problems)}); try "
            "again when its trainer or a validator runs"
        )
    return sorted(answered)
