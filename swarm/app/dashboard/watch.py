"""Follows a run from outside: statuses and receipts of its trusted peers, into a feed."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import trio

from swarm.app.dashboard.feed import Feed
from swarm.app.dashboard.history import History
from swarm.app.dashboard.snapshot import Snapshot, snapshot_of
from swarm.app.onlooker import RunStatus, ask_all, status_of
from swarm.errors import PeerError
from swarm.ledger.client import LedgerClient, own_head
from swarm.ledger.receipts import receipts_from
from swarm.messages import LogHead
from swarm.node.node import Node
from swarm.run.run import Run

INTERVAL_SECONDS = 2.0
"""Pause between two looks at a small run."""

PEERS_PER_SECOND = 100.0
"""Peers that lengthen the pause by a second: heartbeats come every 10 s, and a trusted peer sends
all of them to everybody who looks on."""

ENTRIES_BEHIND_MAX = 20_000
"""Entries of a log that are read when the dashboard starts, the newest."""

PAGES_MAX = 16
"""Pages of receipts from one validator in one look; the next look goes on."""

RECEIPTS_SECONDS_MAX = 20.0
"""Deadline for the receipts of one look."""


@dataclass
class Watcher:
    """One run's state, as far as it was read."""

    node: Node
    run: Run
    history: History = field(default_factory=History)
    read: dict[str, int] = field(default_factory=dict)
    """Index of the next entry to read, by validator."""

    async def look(self) -> Snapshot:
        """Ask the trusted peers what is new; raises `PeerError` when none answers."""
        status = await status_of(self.node, self.run)
        problems: list[str] = []
        with trio.move_on_after(RECEIPTS_SECONDS_MAX) as patience:

            async def ask(client: LedgerClient) -> None:
                await self._read_receipts(client, status)

            await ask_all(self.node, self.run.manifest.validator_ids(), ask, problems)
        if patience.cancelled_caught:
            problems.append(f"A validator sent no verdicts within {RECEIPTS_SECONDS_MAX:g} s.")
        return snapshot_of(status, self.history, problems)

    async def _read_receipts(self, client: LedgerClient, status: RunStatus) -> None:
        order = status.order
        if order is None:
            return
        head = await own_head(client)
        size = head.expect(LogHead).size
        start = self.read.get(client.peer, max(0, size - ENTRIES_BEHIND_MAX))
        for _ in range(PAGES_MAX):
            receipts, _after = await receipts_from(client, head, start)
            if not receipts:
                break
            for receipt in receipts:
                if receipt.envelope.body.run == self.run.id:
                    self.history.learn(receipt.verdict, client.peer, order)
            start = self.read[client.peer] = receipts[-1].index + 1


async def watch(watcher: Watcher, feed: Feed) -> None:
    """Keep a feed up to date until cancelled. A failure is shown beside the last state."""
    while True:
        try:
            snapshot = await watcher.look()
        except PeerError as error:
            old = feed.snapshot
            head = msgspec.structs.replace(old.head, problems=[f"Out of date: {error}"])
            snapshot = msgspec.structs.replace(old, head=head)
        feed.publish(snapshot)
        await trio.sleep(INTERVAL_SECONDS + len(snapshot.peers) / PEERS_PER_SECOND)
