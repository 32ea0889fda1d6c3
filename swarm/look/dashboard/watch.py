"""Follows a run from outside: statuses and logs of its trusted peers, into a feed."""

import gzip
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import trio

from swarm.errors import PeerError
from swarm.ledger import merkle
from swarm.ledger.client import LedgerClient, own_head
from swarm.ledger.entries import CheckpointPublished, decode
from swarm.ledger.receipts import receipts_from
from swarm.ledger.wire import RECEIPTS_MAX
from swarm.look.dashboard.history import History
from swarm.look.dashboard.snapshot import Readable, Snapshot, snapshot_of
from swarm.look.onlooker import ask_all, status_of
from swarm.node.node import Node
from swarm.run.run import Run
from swarm.terminal.untrusted import printable
from swarm.wire.envelope import Envelope
from swarm.wire.messages import LogHead, StepOrder

GZIP_LEVEL = 1
"""1,000 peers: 486 kB become 84 kB in 3.5 ms, and 78 kB in 6.4 ms at level 6."""


class Feed:
    """The newest snapshot, encoded and compressed once for all pages that ask."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.version = 0
        self.snapshot = snapshot
        self._encoded = b""
        self._packed = b""

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the snapshot; one with the same content is no newer version."""
        if snapshot != self.snapshot:
            self.version += 1
            self.snapshot = snapshot
            self._encoded = self._packed = b""

    def encoded(self) -> bytes:
        """The snapshot as JSON, of which all clients that take it share one copy."""
        self._encoded = self._encoded or msgspec.json.encode(self.snapshot)
        return self._encoded

    def packed(self) -> bytes:
        """The same, compressed by gzip."""
        self._packed = self._packed or gzip.compress(self.encoded(), GZIP_LEVEL, mtime=0)
        return self._packed


INTERVAL_SECONDS = 2.0
"""Pause between two looks at a small run."""

PEERS_PER_SECOND = 100.0
"""Peers that lengthen the pause by a second: heartbeats come every 10 s, and a trusted peer sends
all of them to everybody who looks on."""

ENTRIES_BEHIND_MAX = 20_000
"""Entries of a log that are read when the dashboard starts, the newest."""

PAGES_MAX = 16
"""Pages of one log that are read in one look; the next look goes on."""

LOGS_SECONDS_MAX = 20.0
"""Deadline for reading logs in one look."""


@dataclass
class Watcher:
    """One run's state, as far as it was read."""

    node: Node
    run: Run
    home: Path | None = None
    """Home of a trusted peer, whose rollouts can be read; None: there are none to read."""
    public: bool = False
    """Whether anybody may read the page, and so only the newest rollouts."""
    history: History = field(default_factory=History)
    read: dict[str, int] = field(default_factory=dict)
    """Index of the next entry to read, by the owner of the log."""

    async def look(self) -> Snapshot:
        """Ask the trusted peers what is new; raises `PeerError` when none answers."""
        status = await status_of(self.node, self.run)
        problems: list[str] = []
        manifest = self.run.manifest
        if status.evaluation is not None:
            self.history.learn_evaluation(status.evaluation)
        order = status.order
        if order is not None or manifest.outer.rounds:
            with trio.move_on_after(LOGS_SECONDS_MAX) as patience:

                async def ask(client: LedgerClient) -> None:
                    head = await own_head(client)
                    if order is not None and manifest.is_validator(client.peer):
                        await self._read_receipts(client, head, order)
                    if manifest.is_trainer(client.peer):
                        await self._read_training(client, head.expect(LogHead), order)

                logs = dict.fromkeys([*manifest.validator_ids(), *manifest.trainer_ids()])
                await ask_all(self.node, list(logs), ask, problems)
            if patience.cancelled_caught:
                problems.append(f"A log was not read within {LOGS_SECONDS_MAX:g} s.")
        rollouts: Readable = "" if self.home is None else "newest" if self.public else "any"
        return snapshot_of(status, self.history, problems, rollouts=rollouts)

    def _start(self, reader: str, size: int) -> int:
        return self.read.get(reader, max(0, size - ENTRIES_BEHIND_MAX))

    async def _read_receipts(self, client: LedgerClient, head: Envelope, order: StepOrder) -> None:
        start = self._start(client.peer, head.expect(LogHead).size)
        for _ in range(PAGES_MAX):
            receipts, _after = await receipts_from(client, head, start)
            if not receipts:
                break
            if client.peer not in self.read:
                self.history.begin([receipt.verdict for receipt in receipts], order)
            for receipt in receipts:
                if receipt.envelope.body.run == self.run.id:
                    self.history.learn(receipt.verdict, client.peer, order)
            start = self.read[client.peer] = receipts[-1].index + 1

    async def _read_training(
        self, client: LedgerClient, head: LogHead, order: StepOrder | None
    ) -> None:
        reader = f"{client.peer} trains"
        start = self._start(reader, head.size)
        for _ in range(PAGES_MAX):
            if start >= head.size:
                break
            entries, start = await _published_from(client, client.peer, head, start)
            self.read[reader] = start
            rounds = self.run.manifest.outer.rounds
            for entry in entries:
                if entry.round is not None and entry.lineage < rounds:
                    self.history.learn_round(client.peer, entry.lineage + 1, entry.round)
                elif order is not None:
                    self.history.learn_training(entry, order)


async def _published_from(
    client: LedgerClient, owner: str, head: LogHead, start: int
) -> tuple[list[CheckpointPublished], int]:
    """Fetch a page of `owner`'s log from index `start` on; also returns where the next one begins.

    Returns the policies with figures among the entries, and checks their proofs to `head`. Raises
    `PeerError` when the answer does not hold."""
    raws, origin = await client.entries_or_origin(owner, start, head.size - start)
    start = origin.start if origin is not None else start  # the entries before are pruned
    found: dict[int, tuple[bytes, CheckpointPublished]] = {}
    for index, raw in enumerate(raws, start):
        try:
            entry = decode(raw)
        except ValueError as error:
            raise PeerError(f"{client.peer} sent {error}") from error
        if isinstance(entry, CheckpointPublished) and (entry.figures or entry.round):
            found[index] = raw, entry
    indices = list(found)
    for first in range(0, len(indices), RECEIPTS_MAX):
        part = indices[first : first + RECEIPTS_MAX]
        proofs = await client.inclusions(owner, part, head.size)
        for index, proof in zip(part, proofs, strict=True):
            leaf = merkle.leaf_hash(found[index][0])
            if not merkle.verify_inclusion(leaf, index, head.size, proof, head.root):
                raise PeerError(f"{client.peer} sent entry {index}, which is not in its log")
    return [entry for _, entry in found.values()], start + len(raws)


async def first_look(watcher: Watcher) -> Snapshot:
    """Look until a trusted peer answers: the run may have been started with the page."""
    said = False
    while True:
        try:
            return await watcher.look()
        except PeerError as error:
            if not said:
                print(f"{error}; the page begins with the first answer", file=sys.stderr)
            said = True
            await trio.sleep(INTERVAL_SECONDS)


async def watch(watcher: Watcher, feed: Feed) -> None:
    """Keep a feed up to date until cancelled. A failure is shown beside the last state."""
    heard = trio.current_time()
    while True:
        try:
            snapshot = await watcher.look()
            heard = trio.current_time()
        except PeerError as error:
            snapshot = _out_of_date(feed.snapshot, str(error), trio.current_time() - heard)
        feed.publish(snapshot)
        await trio.sleep(INTERVAL_SECONDS + len(snapshot.peers) / PEERS_PER_SECOND)


def _out_of_date(last: Snapshot, reason: str, seconds: float) -> Snapshot:
    head = msgspec.structs.replace(
        last.head,
        trainer="No trusted peer of the run answers: all that this page shows is "
        f"{seconds:,.0f} s old.",
        problems=[printable(reason)],
    )
    return msgspec.structs.replace(last, head=head)
