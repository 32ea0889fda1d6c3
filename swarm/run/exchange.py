"""Run manifests from peer to peer.

A peer hands out the manifests it knows over `/swarm/runs/1.0.0`, older versions when asked for one
by its digest, and takes newer ones there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from swarm.envelope import ENVELOPE_BYTES_MAX, Envelope
from swarm.errors import PeerError, UserError
from swarm.identity import PeerId
from swarm.messenger import REQUEST_DEADLINE_SECONDS
from swarm.run.manifest import check_manifest, run_id
from swarm.transport import Stream, Transport

MANIFESTS_MAX = 64
"""Run manifests a bootstrap peer hands out."""

PROTOCOL = "/swarm/runs/1.0.0"

BOOTSTRAP_SECONDS = 15.0
"""A trusted peer compares manifests with the bootstrap peers so often: an owner hands a new version
to one of them, or restarts it with a new file."""

LIST = b"list"
"""Asks for the newest manifest of every run known."""

DIGEST_BYTES = 32


def serve_manifests(
    transport: Transport,
    *,
    newest: Callable[[], Sequence[Envelope]],
    version: Callable[[bytes], Envelope | None],
    hear: Callable[[Envelope], Envelope | None],
) -> None:
    """Hand out run manifests: the `newest` of each run known, or the `version` of some content.
    `hear` takes one that is brought here, and gives the newest known of its run after that."""

    async def answer(stream: Stream) -> None:
        asked = await stream.receive()
        if asked is None:
            return
        found: Sequence[Envelope | None]
        if asked == LIST:
            found = newest()[:MANIFESTS_MAX]
        elif len(asked) == DIGEST_BYTES:
            found = [version(asked)]
        else:
            try:
                found = [hear(check_manifest(asked, f"what {stream.peer} sent"))]
            except UserError:
                found = []
        for envelope in found:
            if envelope is not None:
                await stream.send(envelope.raw)
        await stream.end()

    transport.serve(PROTOCOL, answer, frame_bytes_max=ENVELOPE_BYTES_MAX)


async def ask_for_manifests(
    transport: Transport, peer: PeerId, asked: bytes = LIST
) -> list[Envelope]:
    """The manifests with which a connected peer answers, signatures checked; raises `PeerError`.

    `asked`: `LIST` for the newest of each run; a content's digest for that version; a whole
    manifest to bring it there and have the newest of its run.
    """
    found: dict[str, Envelope] = {}
    try:
        with trio.fail_after(REQUEST_DEADLINE_SECONDS):
            stream = await transport.open_stream(peer, PROTOCOL)
            await stream.send(asked)
            await stream.end()
            while (raw := await stream.receive()) is not None and len(found) < MANIFESTS_MAX:
                try:
                    envelope = check_manifest(raw, f"what {peer} sent")
                except UserError as error:
                    raise PeerError(str(error)) from error
                found[run_id(envelope)] = envelope
    except trio.TooSlowError as error:
        raise PeerError(f"{peer} did not list its runs in time") from error
    return [envelope for _, envelope in sorted(found.items())]
