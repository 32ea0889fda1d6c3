"""Exchange of run manifests between peers.

Over `/swarm/runs/1.0.0` a peer hands out the manifests that it knows, also an older version by its
digest, and accepts newer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from swarm.envelope import ENVELOPE_BYTES_MAX, Envelope
from swarm.errors import PeerError, UserError
from swarm.identity import PeerId
from swarm.messenger import REQUEST_DEADLINE_SECONDS
from swarm.run.manifest import Outgrown, check_manifest, run_id
from swarm.transport import Stream, Transport

MANIFESTS_MAX = 64
"""Most run manifests in one answer."""

PROTOCOL = "/swarm/runs/1.0.0"

BOOTSTRAP_SECONDS = 15.0
"""Interval at which a trusted peer compares manifests with the bootstrap peers: an owner hands a
new version to one of them, or restarts it with a new file."""

LIST = b"list"
"""Request for the newest manifest of every known run, by id, the first `MANIFESTS_MAX` of them."""

AFTER = b"list after "
"""Request for the next `MANIFESTS_MAX`: those after the run whose id follows these bytes."""

RUNS_MAX = 512
"""Most runs that are read of one peer, in 8 answers. Each manifest is at most 64 KiB."""

DIGEST_BYTES = 32


def serve_manifests(
    transport: Transport,
    *,
    newest: Callable[[], Sequence[Envelope]],
    version: Callable[[bytes], Envelope | None],
    hear: Callable[[Envelope], Envelope | None],
) -> None:
    """Answer requests for run manifests.

    `newest` returns the newest manifest of each known run. `version` finds a manifest by its
    content digest. `hear` accepts a manifest that a peer brings, and returns the newest known one
    of its run.
    """

    async def answer(stream: Stream) -> None:
        asked = await stream.receive()
        if asked is None:
            return
        found: Sequence[Envelope | None]
        if asked == LIST or (len(asked) != DIGEST_BYTES and asked.startswith(AFTER)):
            after = asked.removeprefix(AFTER).decode("utf-8", "replace") if asked != LIST else ""
            later = (each for each in newest() if run_id(each) > after)
            found = sorted(later, key=run_id)[:MANIFESTS_MAX]
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
    transport: Transport, peer: PeerId, asked: bytes = LIST, *, wanted: str | None = None
) -> list[Envelope]:
    """Request manifests from a connected peer and check their signatures; raises `PeerError`.

    `asked` is `LIST` or `AFTER` and a run's id for the newest manifests, a content digest for that
    version, or a complete manifest. The peer accepts a complete manifest if it is newer, and
    answers with its newest of that run.

    Runs of protocol versions that this build does not speak are left out. Raises `Outgrown` if one
    of them is `wanted`, a run's id or name, or if it is the only run in a list.
    """
    found: dict[str, Envelope] = {}
    outgrown: list[Outgrown] = []
    try:
        with trio.fail_after(REQUEST_DEADLINE_SECONDS):
            stream = await transport.open_stream(peer, PROTOCOL)
            await stream.send(asked)
            await stream.end()
            while (raw := await stream.receive()) is not None:
                if len(found) + len(outgrown) == MANIFESTS_MAX:
                    break
                try:
                    envelope = check_manifest(raw, f"what {peer} sent")
                except Outgrown as error:
                    outgrown.append(error)
                    continue
                except UserError as error:
                    raise PeerError(str(error)) from error
                found[run_id(envelope)] = envelope
    except trio.TooSlowError as error:
        raise PeerError(f"{peer} did not list its runs in time") from error
    for each in outgrown:
        alone = asked == LIST and wanted is None and not found
        if alone or wanted in (each.run, each.run.partition("/")[2]):
            raise each
    return [envelope for _, envelope in sorted(found.items())]


async def list_runs(
    transport: Transport, peer: PeerId, wanted: str | None = None
) -> list[Envelope]:
    """Request the newest manifest of every run that a connected peer knows, page by page.

    Raises `PeerError`, and `Outgrown` as `ask_for_manifests` does. A peer of an earlier version
    answers with the first page only.
    """
    found: dict[str, Envelope] = {}
    asked = LIST
    for _ in range(RUNS_MAX // MANIFESTS_MAX):
        page = await ask_for_manifests(transport, peer, asked, wanted=wanted)
        found |= {run_id(envelope): envelope for envelope in page}
        if len(page) < MANIFESTS_MAX // 2:  # a full page may lack runs of other versions
            break
        asked = AFTER + run_id(page[-1]).encode()
    return list(found.values())
