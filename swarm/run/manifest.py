"""Signed run manifests: their names, digests and files."""

from __future__ import annotations

from pathlib import Path

import blake3

from swarm import PROTOCOL_VERSION
from swarm.envelope import Dropped, Envelope, open_envelope
from swarm.errors import UserError
from swarm.manifest import RunManifest

MANIFEST_LIFETIME_SECONDS = 90 * 24 * 3600.0
"""A run manifest is valid for 90 days unless the owner signs a newer one."""


def run_id(manifest: Envelope) -> str:
    """Return the id of a manifest's run: `<owner peer id>/<name>`."""
    return f"{manifest.sender}/{manifest.expect(RunManifest).name}"


def manifest_in(envelope: Envelope) -> RunManifest:
    """Return the run manifest that an envelope carries."""
    return envelope.expect(RunManifest)


def content_digest(manifest: Envelope) -> bytes:
    """BLAKE3-256 of a run manifest's payload; does not depend on when it was signed."""
    return blake3.blake3(manifest.body.payload).digest()


def load_manifest(path: Path) -> Envelope:
    """Read a signed manifest from a file written by `swarm run create`; raises `UserError`."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"run manifest {path} cannot be read ({error.strerror})") from error
    return check_manifest(raw, str(path))


def check_manifest(raw: bytes, where: str) -> Envelope:
    """Open bytes as a signed manifest. Raises a `UserError` that begins with `where`."""
    try:
        envelope = open_envelope(raw)
    except Dropped as dropped:
        hint = {
            "unknown_version": "; it needs another version of Swarm "
            f"(this one speaks {PROTOCOL_VERSION})",
            "malformed": "; it is damaged, or an earlier version of Swarm signed it: its owner "
            "signs it again with swarm run create",
        }.get(dropped.cause, "")
        raise UserError(f"{where} is not a valid run manifest ({dropped}){hint}") from dropped
    if not isinstance(envelope.message, RunManifest) or envelope.body.run != run_id(envelope):
        raise UserError(f"{where} holds a {envelope.body.kind}, not a run manifest")
    return envelope
