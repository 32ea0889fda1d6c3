"""The policies that the trainers of a run have announced, as this peer has heard it.

Gossip repeats the newest announcement only. In a run whose workers swap weights in flight
(`Sampling.swaps_max`), a submission names older ones, too: a worker presents their announcements to
its validator, and both keep them over a restart. A trainer keeps its own, to find policies again
that were deleted from its disk.
"""

from __future__ import annotations

import sqlite3

from swarm.node.node import Node
from swarm.run.run import Run
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.messages import Checkpoint, CheckpointReference
from swarm.world.observable import Observable

ANNOUNCEMENTS_MAX = 300
"""Announcements remembered: rollouts of at most 256 steps back may be trained on."""


class Announced:
    """The signed announcements of one run's policies, by (lineage, step)."""

    def __init__(self, node: Node, run: Run) -> None:
        self._node = node
        self._run = run
        self._known: dict[tuple[int, int], Envelope] = {}
        self._unstored: list[Envelope] = []
        self._changed = Observable(0)

    def note(self, envelope: Envelope) -> None:
        """Remember an announcement, whose sender the caller has found to be a trainer."""
        key = envelope.message.order()
        held = self._known.get((key[0], key[1]))
        if held is not None and held.body.issued_ms >= envelope.body.issued_ms:
            return
        self._remember(envelope)
        self._unstored.append(envelope)
        self._changed.touch()

    def find(self, lineage: int, step: int) -> Envelope | None:
        """The announcement of a policy."""
        return self._known.get((lineage, step))

    def reference_of(self, lineage: int, step: int) -> CheckpointReference | None:
        """The reference that the announcement of a policy names."""
        found = self.find(lineage, step)
        return found.expect(Checkpoint).reference if found is not None else None

    def references(self, lineage: int) -> list[CheckpointReference]:
        """The policies of a lineage, in order."""
        known = sorted(item for item in self._known.items() if item[0][0] == lineage)
        return [envelope.expect(Checkpoint).reference for _, envelope in known]

    def newest_of(self, lineage: int) -> int | None:
        """Number of a lineage's newest policy announced."""
        return max((step for each, step in self._known if each == lineage), default=None)

    def _remember(self, envelope: Envelope) -> None:
        reference = envelope.expect(Checkpoint).reference
        self._known[reference.lineage, reference.step] = envelope
        while len(self._known) > ANNOUNCEMENTS_MAX:
            del self._known[min(self._known)]

    # --- over a restart ----------------------------------------------------------------------

    async def open(self) -> None:
        """Recall what was announced before a restart."""

        def create(connection: sqlite3.Connection) -> None:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS announced (run TEXT NOT NULL, lineage INTEGER NOT NULL,"
                " step INTEGER NOT NULL, envelope BLOB NOT NULL, PRIMARY KEY (run, lineage, step))"
                " WITHOUT ROWID"
            )

        await self._node.database.transact(create)
        for (raw,) in self._node.database.read(
            "SELECT envelope FROM announced WHERE run = ? ORDER BY lineage, step", (self._run.id,)
        ):
            try:
                self._remember(open_envelope(raw))
            except Dropped:  # another version of Swarm wrote it
                continue

    async def keep(self) -> None:
        """Store what is announced, as far as this peer keeps it, until cancelled."""
        while True:
            if not self._unstored:
                await self._changed.wait_change()
            stored, self._unstored = self._unstored, []
            if self._is_kept:
                await self._store(stored)

    async def _store(self, stored: list[Envelope]) -> None:
        rows = [(self._run.id, *each.message.order(), each.raw) for each in stored]
        oldest = min(self._known)

        def store(connection: sqlite3.Connection) -> None:
            connection.executemany("INSERT OR REPLACE INTO announced VALUES (?, ?, ?, ?)", rows)
            connection.execute(
                "DELETE FROM announced WHERE run = ? AND (lineage, step) < (?, ?)",
                (self._run.id, *oldest),
            )

        await self._node.database.transact(store)

    @property
    def _is_kept(self) -> bool:
        """Without swaps, a submission names the policy of its step order only.

        A later version of the manifest may allow them.
        """
        manifest = self._run.manifest
        return manifest.sampling.swaps_max > 0 or manifest.is_trainer(self._node.peer_id)
