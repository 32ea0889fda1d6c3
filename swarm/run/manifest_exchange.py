"""Exchange of run manifests between peers.

Over `/swarm/runs/1.0.0` a peer hands out the manifests that it knows, also an older version by its
digest, and accepts newer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from swarm.errors import DeadlineError, PeerError, UserError
from swarm.run.manifest import Outgrown, check_manifest, run_id
from swarm.transport import Stream, Transport
from swarm.transport.rates import HourlyBytes, NetworkBudgets
from swarm.wire.envelope import ENVELOPE_BYTES_MAX, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messenger import REQUEST_DEADLINE_SECONDS

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

HOURLY_LISTS = HourlyBytes(network=256 << 20, unplaced=1 << 30, all=2 << 30)
"""Bytes of lists that a peer sends in an hour: a request of a few bytes gets up to 4 MiB. A run is
3 KiB, so a network gets 80,000 of them."""


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

    A peer whose network has used up `HOURLY_LISTS` gets no list: its stream is reset.
    """
    budgets = NetworkBudgets(HOURLY_LISTS)

    async def answer(stream: Stream) -> None:
        asked = await stream.receive()
        if asked is None:
            return
        found: Sequence[Envelope | None]
        if asked == LIST or (len(asked) != DIGEST_BYTES and asked.startswith(AFTER)):
            after = asked.removeprefix(AFTER).decode("utf-8", "replace") if asked != LIST else ""
            later = (each for each in newest() if run_id(each) > after)
            found = page = sorted(later, key=run_id)[:MANIFESTS_MAX]
            size = sum(len(envelope.raw) for envelope in page)
            network = transport.network_of(stream.peer)
            if budgets.charge(stream.peer, network, size).take(trio.current_time()):
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
    """Request manifests from a connected peer and check their signatures; raises `PeerError`.

    `asked` is `LIST` or `AFTER` and a run's id for the newest manifests, a content digest for that
    version, or a complete manifest. The peer accepts a complete manifest if it is newer, and
    answers with its newest of that run.

    Runs of protocol versions that this build does not speak are left out. Raises `Outgrown` if one
    of them is `wanted`, a run's id or name, or if it is the only run in a list.
    """
    page = await _ask(transport, peer, asked)
    _raise_outgrown(page, wanted, alone=asked == LIST and wanted is None)
    return sorted(page.found.values(), key=run_id)


async def list_runs(
    transport: Transport, peer: PeerId, wanted: str | None = None
) -> list[Envelope]:
    """Request the newest manifest of every run that a connected peer knows, page by page.

    Raises `PeerError` (`DeadlineError` if it takes too long), and `Outgrown` as `ask_for_manifests`
    does. A peer of an earlier version answers with the first page only. Of a list longer than
    `RUNS_MAX`, the run whose id is `wanted` is read as well.
    """
    runs = _Page()
    asked, last = LIST, ""
    for _ in range(RUNS_MAX // MANIFESTS_MAX):
        page = await _ask(transport, peer, asked)
        runs.add(page)
        if page.frames < MANIFESTS_MAX or page.last <= last:
            break
        last = page.last
        asked = AFTER + last.encode()
    else:
        if wanted is not None and "/" in wanted and wanted not in runs.found:
            runs.add(await _ask(transport, peer, AFTER + wanted[:-1].encode()))
    _raise_outgrown(runs, wanted, alone=wanted is None)
    return list(runs.found.values())


@dataclass
class _Page:
    """What a peer answered to one request or more."""

    found: dict[str, Envelope] = field(default_factory=dict)
    outgrown: list[Outgrown] = field(default_factory=list)
    frames: int = 0
    """With those that this build cannot read."""

    @property
    def last(self) -> str:
        """The last run's id; empty if there is none."""
        return max([*self.found, *(each.run for each in self.outgrown)], default="")

    def add(self, other: _Page) -> None:
        self.found |= other.found
        self.outgrown += other.outgrown


async def _ask(transport: Transport, peer: PeerId, asked: bytes) -> _Page:
    """Send one request; raises `PeerError`, also if nothing of the answer can be read, and
    `DeadlineError` if it takes too long."""
    page = _Page()
    problem: UserError | None = None
    try:
        with trio.fail_after(REQUEST_DEADLINE_SECONDS):
            stream = await transport.open_stream(peer, PROTOCOL)
            await stream.send(asked)
            await stream.end()
            while (raw := await stream.receive()) is not None:
                if page.frames == MANIFESTS_MAX:
                    await stream.reset()
                    break
                page.frames += 1
                try:
                    envelope = check_manifest(raw, f"what {peer} sent")
                    page.found[run_id(envelope)] = envelope
                except Outgrown as error:
                    page.outgrown.append(error)
                except UserError as error:
                    # One owner's manifest that this build cannot read hides nobody else's.
                    problem = error
    except trio.TooSlowError as error:
        raise DeadlineError(f"{peer} did not list its runs in time") from error
    if problem is not None and not page.last:
        raise PeerError(str(problem)) from problem
    return page


def _raise_outgrown(page: _Page, wanted: str | None, *, alone: bool) -> None:
    """Raise the `Outgrown` of the run that is wanted; with `alone`, also that of the only runs."""

    def is_wanted(run: str) -> bool:
        return wanted in (run, run.partition("/")[2])

    if any(map(is_wanted, page.found)):  # a stranger's run of the same name does not count
        return
    for each in page.outgrown:
        if (alone and not page.found) or is_wanted(each.run):
            raise each
