"""Signing a version of a run and handing it to the network."""

from collections.abc import Sequence
from pathlib import Path

from swarm.errors import PeerError, SwarmError, UserError
from swarm.run.changes import NEVER, Change, changes, values_listed
from swarm.run.manifest import (
    MANIFEST_LIFETIME_SECONDS,
    content_digest,
    load_manifest,
    manifest_in,
    with_needs,
)
from swarm.run.manifest_exchange import ask_for_manifests
from swarm.transport import Transport
from swarm.wire.envelope import Envelope, seal
from swarm.wire.identity import Identity, PeerId
from swarm.wire.manifest import VERSION_MAX, RunManifest
from swarm.wire.succession import taken_over


def sign_manifest(
    signer: Identity, manifest: RunManifest, wall_time: float, run: str = ""
) -> Envelope:
    """Sign a run manifest. `run` is the run's id, unless the signer is its first owner.

    Raises `UserError` if it is too large."""
    complete = with_needs(manifest, f"run {manifest.name}")
    return _sealed(signer, complete, wall_time, run or f"{signer.peer_id}/{manifest.name}")


def sign_takeover(standby: Identity, held: Envelope, trainer: str, wall_time: float) -> Envelope:
    """Sign the version in which a standby replaces a trainer of `held`. Raises as above."""
    return _sealed(standby, taken_over(held, standby.peer_id, trainer), wall_time, held.body.run)


def _sealed(signer: Identity, manifest: RunManifest, wall_time: float, run: str) -> Envelope:
    if manifest.version > VERSION_MAX:
        raise UserError(
            f"run {run} has version {manifest.version - 1:,}, the highest there can be, so nothing "
            "can follow it; only a successor can go on, from an earlier version: swarm run succeed"
        )
    try:
        return seal(
            signer,
            manifest,
            run=run,
            sequence=int(wall_time * 1000),
            wall_time=wall_time,
            lifetime_seconds=MANIFEST_LIFETIME_SECONDS,
        )
    except ValueError as error:
        raise UserError(
            f"{error}; shorten the manifest's lists, such as admissions.allowed"
        ) from error


def signed_before(path: Path, owner: str, name: str) -> Envelope | None:
    """Read a signed manifest from a file; None unless it is of this owner's run of that name."""
    try:
        held = load_manifest(path)
    except UserError:
        return None
    return held if held.body.run == f"{owner}/{name}" else None


def check_update(held: RunManifest, new: RunManifest, where: str) -> list[Change]:
    """List the changes from the signed version `held` to `new`, described in the file `where`.

    Raises `UserError` if peers would refuse `new`. An unchanged one of that version is allowed."""
    found = changes(held, new)
    if new.version < held.version:
        raise UserError(
            f"{where}: version is {new.version}, but version {held.version} is signed already; "
            f"raise version to {held.version + 1}"
        )
    if new.version == held.version and found:
        raise UserError(
            f"{where}: version is {new.version}, but version {new.version} is signed already with "
            f"other content ({values_listed(found)}); raise version to {held.version + 1}"
        )
    impossible = [each.field for each in found if each.when == NEVER]
    if impossible:
        raise UserError(
            f"{where}: version {new.version} changes {', '.join(impossible)}, which is not "
            "possible in a running run: start a new one, under another name"
        )
    return found


def listed(found: Sequence[Change]) -> list[str]:
    """Format each change as a line, in columns."""
    if not found:
        return ["  nothing else changes"]
    values = [f"{each.old} → {each.new}" for each in found]
    names, widest = max(len(each.field) for each in found), max(map(len, values))
    return [
        f"  {each.field:<{names}}  {value:<{min(widest, 40)}}  {each.when}"
        for each, value in zip(found, values, strict=True)
    ]


async def hand_over(
    transport: Transport, bootstrap: Sequence[str], envelope: Envelope
) -> list[PeerId]:
    """Hand a signed manifest to the connected ones of these peers; returns those that took it.

    Raises `SwarmError` if none did."""
    taken, problems = [], []
    for peer in dict.fromkeys(PeerId(address.rpartition("/p2p/")[2]) for address in bootstrap):
        if peer not in transport.connected():
            continue
        try:
            held = await ask_for_manifests(transport, peer, envelope.raw)
        except PeerError as error:
            problems.append(str(error))
            continue
        if any(content_digest(each) == content_digest(envelope) for each in held):
            taken.append(peer)
        else:
            versions = [str(manifest_in(each).version) for each in held]
            problems.append(f"{peer} still has version {', '.join(versions) or 'none'}")
    if not taken:
        raise SwarmError(f"no peer took the manifest: {'; '.join(problems)}")
    return taken
