"""Signed run manifests: their names, digests and files."""

from pathlib import Path

import blake3
import msgspec

from swarm.errors import UserError, file_errors
from swarm.wire.envelope import (
    ENVELOPE_BYTES_MAX,
    ENVELOPE_VERSION,
    Dropped,
    Envelope,
    NeedsNewer,
    open_envelope,
)
from swarm.wire.manifest import RunManifest
from swarm.wire.protocol import PROTOCOL_VERSION, UPGRADE, protocol_problem
from swarm.wire.succession import NotAuthorised, ownership_of

MANIFEST_LIFETIME_SECONDS = 90 * 24 * 3600.0
"""A run manifest is valid for 90 days unless the owner signs a newer one."""


def run_id(manifest: Envelope) -> str:
    """Return the id of a checked manifest's run: `<first owner's peer id>/<name>`."""
    return manifest.body.run


def manifest_in(envelope: Envelope) -> RunManifest:
    return envelope.expect(RunManifest)


def content_digest(manifest: Envelope) -> bytes:
    """BLAKE3-256 of a run manifest's payload; does not depend on when it was signed."""
    return blake3.blake3(manifest.body.payload).digest()


def load_manifest(path: Path) -> Envelope:
    """Read a signed manifest from a file written by `swarm run create`; raises `UserError`."""
    with file_errors(f"run manifest {path}"), path.open("rb") as file:
        raw = file.read(ENVELOPE_BYTES_MAX + 1)  # just enough of a larger one to refuse it
    return check_manifest(raw, str(path))


def with_needs(manifest: RunManifest, where: str) -> RunManifest:
    """Return the manifest with this build's protocol version as the one that its peers need: who
    signs it describes the run by what this build knows.

    `where` names the file in which the owner set `needs`. Raises `UserError` for a higher version.
    """
    if manifest.needs > PROTOCOL_VERSION:
        raise UserError(
            f"{where}: needs is {manifest.needs}, and this build speaks {PROTOCOL_VERSION}; it "
            "can sign no run that it does not understand"
        )
    return msgspec.structs.replace(manifest, needs=PROTOCOL_VERSION)


class Outgrown(UserError):
    """A version of a run's manifest needs a protocol version that this build does not speak."""

    def __init__(self, run: str, version: int, needs: int, signer: str) -> None:
        super().__init__(protocol_problem(run, needs) or run)
        self.run = run
        self.version = version
        self.signer = signer
        """Who signed it, the run's owner or not."""


def check_manifest(raw: bytes, where: str) -> Envelope:
    """Open bytes as a signed manifest.

    Raises `Outgrown`, or another `UserError` that begins with `where`."""
    try:
        envelope = open_envelope(raw)
    except NeedsNewer as newer:
        if newer.run.partition("/")[0] != newer.sender:  # a successor, or a liar
            raise UserError(f"{where} cannot be read ({newer}): upgrade with {UPGRADE}") from newer
        raise Outgrown(newer.run, newer.version, newer.needs, newer.sender) from newer
    except Dropped as dropped:
        hint = {
            "unknown_version": "; it needs another version of Swarm "
            f"(this one reads envelopes of version {ENVELOPE_VERSION})",
            "malformed": "; it is damaged, or an earlier version of Swarm signed it: its owner "
            "signs it again with swarm run create",
        }.get(dropped.cause, "")
        raise UserError(f"{where} is not a valid run manifest ({dropped}){hint}") from dropped
    if not isinstance(envelope.message, RunManifest):
        raise UserError(f"{where} holds a {envelope.body.kind}, not a run manifest")
    manifest = envelope.message
    if protocol_problem(envelope.body.run, manifest.needs) is not None:
        raise Outgrown(envelope.body.run, manifest.version, manifest.needs, envelope.sender)
    try:
        ownership_of(envelope)
    except NotAuthorised as error:
        raise UserError(f"{where} is not a valid run manifest: {error}") from error
    return envelope
