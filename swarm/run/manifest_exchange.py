"""Exchange of run manifests between peers.

Over `/swarm/runs/2.0.0` a peer hands out the manifests that it knows, also an older version by its
digest, and accepts newer ones."""

from collections.abc import Callable, Sequence

import trio

from swarm.errors import DeadlineError, PeerError, UserError
from swarm.run.manifest import Outgrown, check_manifest, run_id
from swarm.transport import Stream, Transport
from swarm.transport.rates import HourlyBytes, NetworkBudgets
from swarm.wire.envelope import ENVELOPE_BYTES_MAX, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messenger import REQUEST_DEADLINE_SECONDS

MANIFESTS_MAX = 256
"""Most run manifests in one answer, each of at most 64 KiB."""

PROTOCOL = "/swarm/runs/2.0.0"

BOOTSTRAP_SECONDS = 15.0
"""Interval at which a trusted peer compares manifests with the bootstrap peers: an owner hands a
new version to one of them, or restarts it with a new file."""

LIST = b"list"
"""Request for the newest manifest of every known run, the first `MANIFESTS_MAX` by id."""

DIGEST_BYTES = 32

HOURLY_LISTS = HourlyBytes(network=256 << 20, unplaced=1 << 30, all=2 << 30)
"""Bytes of lists that a peer sends in an hour: a request of a few bytes gets up to 16 MiB. A run is
3 KiB, so a network gets 80,000 of them."""


def serve_manifests(
    transport: Transport,
    *,
    newest: Callable[[], Sequence[Envelope]],
    version: Callable[[bytes], Envelope | None],
    hear: Callable[[Envelope], Envelope | None],
) -> None:
    """Answer requests for run manifests.

    `newest`: those of each known run. `version` finds one by its content digest. `hear` takes one
    that a peer brings, and returns its run's newest.

    A peer whose network has used up `HOURLY_LISTS` gets no list: its stream is reset."""
    budgets = NetworkBudgets(HOURLY_LISTS)

    async def answer(stream: Stream) -> None:
        asked = await stream.receive()
        if asked is None:
            return
        found: Sequence[Envelope | None]
        if asked == LIST:
            found = page = sorted(newest(), key=run_id)[:MANIFESTS_MAX]
            size = sum(len(envelope.raw) for envelope in page)
            network = transport.network_of(stream.peer)
            if not budgets.take(stream.peer, network, size, trio.current_time()):
                await stream.reset()
                return
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
    """Request manifests from a connected peer and check their signatures.

    `asked` is `LIST` for the newest manifests, a content digest for that version, or a complete
    manifest. The peer accepts a complete manifest if it is newer, and answers with its newest of
    that run.

    Raises `PeerError`, also if nothing of the answer can be read, and `DeadlineError` if it takes
    too long. Runs of protocol versions that this build does not speak are left out. Raises
    `Outgrown` if one of them is `wanted`, a run's id or name, or if it is the only run in a list.
    """
    found: dict[str, Envelope] = {}
    outgrown: list[Outgrown] = []
    problem: UserError | None = None
    try:
        with trio.fail_after(REQUEST_DEADLINE_SECONDS):
            stream = await transport.open_stream(peer, PROTOCOL)
            try:
                await stream.send(asked)
                await stream.end()
                raws: list[bytes] = []
                while len(raws) < MANIFESTS_MAX and (raw := await stream.receive()) is not None:
                    raws.append(raw)
            finally:
                await stream.reset()
    except trio.TooSlowError as error:
        raise DeadlineError(f"{peer} did not list its runs in time") from error
    for raw in raws:
        try:
            envelope = check_manifest(raw, f"what {peer} sent")
            found[run_id(envelope)] = envelope
        except Outgrown as error:
            outgrown.append(error)
        except UserError as error:
            # One owner's manifest that this build cannot read hides nobody else's.
            problem = error
    if problem is not None and not found and not outgrown:
        raise PeerError(str(problem)) from problem

    def is_wanted(run: str) -> bool:
        return wanted in (run, run.partition("/")[2])

    if not any(map(is_wanted, found)):  # a stranger's run of the same name does not count
        alone = asked == LIST and wanted is None and not found
        for each in outgrown:
            if alone or is_wanted(each.run):
                raise each
    return sorted(found.values(), key=run_id)
