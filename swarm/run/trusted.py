"""The shared part of trainers and validators: logs, their mirrors, admissions, evictions.

All durable state is in `ledger.sqlite`: this peer's log, and its mirrors of the other trusted
peers' logs. The same transactions derive tables from the entries: signed verdicts, accepted
submissions (for a worker's record), used submissions, admitted peers, and signed evictions and
reinstatements.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from swarm.envelope import STATE_LIFETIME_SECONDS, Dropped, Envelope, Gate, open_envelope
from swarm.errors import PeerError, UserError
from swarm.events import Events
from swarm.gossip.gossip import Gossip
from swarm.identity import PeerId
from swarm.ledger.client import LedgerClient, open_ledger
from swarm.ledger.entries import (
    Admitted,
    Consumed,
    Entry,
    Evicted,
    Judged,
    Reinstated,
    decode,
    judged,
)
from swarm.ledger.log import Log
from swarm.ledger.mirror import Fork, LogMirror
from swarm.ledger.serving import serving_ledger
from swarm.messages import Eviction, Heartbeat, LogHead, Message, Present, Reinstatement, Verdict
from swarm.messenger import Messenger
from swarm.observable import Observable
from swarm.run.registrar import Registrar
from swarm.run.run import Run
from swarm.transport import Transport
from swarm.world import Disk, World

EVICTION_LIFETIME_SECONDS = 30 * 24 * 3600.0
"""Evictions are gossiped to newcomers for 30 days; the ledger keeps them for ever."""

VERDICT_LIFETIME_SECONDS = 600.0
"""Lifetime of a verdict's envelope. A trainer that was down for less still receives the verdict
after its restart."""

UNGRADED_MAX = 5
"""Number of honest submissions in a row that a validator's environment fails to grade before the
validator turns work away. If no validator can grade, the trainer then pauses the run."""

LOG_HEAD_SECONDS = 2.0
"""Interval at which a trusted peer announces the head of its growing log. Others mirror the log
about as often, so a lost disk loses entries of about this time."""

RESTORE_SECONDS = 2.0
"""Time in which a starting trusted peer looks for copies of its own log that have more entries than
its disk."""

RETRY_SECONDS = 5.0
"""Pause before the next attempt to mirror a trusted peer's log."""

STATUS_SECONDS = 1.0
"""Shortest interval at which the status is made anew, however many peers ask."""

REINSTATEMENTS_WAITING_MAX = 1000
"""Most received reinstatements that wait to be logged. An owner signs only a few."""


class HostNode(Protocol):
    """The node of a host (`swarm.node.node.Node`)."""

    @property
    def world(self) -> World: ...
    @property
    def disk(self) -> Disk: ...
    @property
    def transport(self) -> Transport: ...
    @property
    def events(self) -> Events: ...

    async def reach(self, peer: PeerId) -> None: ...


class Host(Protocol):
    """The peer in a run that a trusted part belongs to (`swarm.node.run_node.RunNode`)."""

    @property
    def node(self) -> HostNode: ...
    @property
    def peer_id(self) -> PeerId: ...
    @property
    def run(self) -> Run: ...
    @property
    def gate(self) -> Gate: ...
    @property
    def gossip(self) -> Gossip: ...
    @property
    def messenger(self) -> Messenger: ...

    async def seal(self, message: Message, lifetime_seconds: float) -> Envelope: ...

    def describe(self) -> Heartbeat: ...

    def newest(self) -> list[Envelope]:
        """Return the newest known manifest, checkpoint and step order."""
        ...


class TrustedPart:
    """The trusted side of one peer. Call `open()` first, then run `run()` in the background."""

    def __init__(self, peer: Host) -> None:
        self._peer = peer
        self._run = peer.run
        self._events = peer.node.events
        self._database = peer.node.disk.database("ledger.sqlite")
        self._log = Log(self._database, peer.peer_id)
        self._appending = trio.Lock()
        self._restored = trio.Event()
        """Set once this disk has all entries of this log that other trusted peers hold."""
        self._grown = Observable(0)
        """Size of the own log after this process's last append; 0 before the first."""
        self._signed_head: Envelope | None = None
        self._status: tuple[float, tuple[list[bytes], list[Present]]] = (-math.inf, ([], []))
        """Time of the last status, and the status."""
        self._others: dict[str, Observable[Envelope]] = {}
        """Newest known head of each other trusted peer's log."""
        self._heard_reinstatement, self._reinstatements = trio.open_memory_channel[Envelope](
            REINSTATEMENTS_WAITING_MAX
        )
        self._heard_owner, self._owners = trio.open_memory_channel[str](math.inf)
        """Peers in `_others` whose logs `_follow_others` does not follow yet."""
        self.registrar = Registrar(
            peer.run,
            peer.gate,
            peer.gossip,
            peer.messenger,
            peer.node.world,
            peer.node.events,
            peer_id=peer.peer_id,
            seal=peer.seal,
            describe=peer.describe,
            accepted=self.accepted_of,
            admitted=self._admitted,
            vouch=peer.node.transport.vouch,
            network_of=peer.node.transport.network_of,
        )
        peer.gossip.listen(LogHead, self._on_head)
        peer.gossip.listen(Reinstatement, self._on_reinstatement)

    def check_role(self, role: str) -> None:
        """Raise `UserError` unless the manifest names this peer for `role`."""
        manifest = self._run.manifest
        named = (
            manifest.is_trainer(self._peer.peer_id)
            if role == "trainer"
            else manifest.is_validator(self._peer.peer_id)
        )
        if not named:
            raise not_named(self._peer, role)

    async def open(self) -> None:
        """Create the tables and apply the stored evictions and reinstatements."""
        await LogMirror.create_tables(self._database)

        def create(connection: sqlite3.Connection) -> None:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS verdicts (position INTEGER PRIMARY KEY, "
                "worker TEXT NOT NULL, envelope BLOB NOT NULL)"
            )
            connection.execute(
                "CREATE INDEX IF NOT EXISTS verdicts_of ON verdicts (worker, position)"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS accepted (worker TEXT, submission BLOB, "
                "PRIMARY KEY (worker, submission)) WITHOUT ROWID"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS expulsions (envelope BLOB PRIMARY KEY) WITHOUT ROWID"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS admitted (peer TEXT PRIMARY KEY) WITHOUT ROWID"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS used (submission BLOB PRIMARY KEY) WITHOUT ROWID"
            )

        await self._database.transact(create)
        for (raw,) in self._database.read("SELECT envelope FROM expulsions ORDER BY envelope"):
            self._apply(raw)

    def close(self) -> None:
        self._database.close()

    # --- appending ---------------------------------------------------------------------------

    async def append(self, entries: list[Entry]) -> None:
        """Append entries to this peer's log; they are durable on return."""
        await self._restored.wait()
        async with self._appending:
            written = await self._log.append(
                entries, lambda connection, _: _derive(connection, entries)
            )
        self._grown.set(written.stop)

    async def append_verdict(self, verdict_at: Callable[[int], Verdict]) -> Envelope:
        """Sign and append the verdict that `verdict_at` makes for its index in the log.

        One transaction makes the log entry and the envelope durable before the return.
        """
        await self._restored.wait()
        async with self._appending:
            verdict = verdict_at(self._log.size())
            envelope = await self._peer.seal(verdict, VERDICT_LIFETIME_SECONDS)
            entry = judged(verdict)

            def keep(connection: sqlite3.Connection, index: int) -> None:
                assert index == verdict.log_index, "somebody else appended to this log"
                connection.execute(
                    "INSERT INTO verdicts (position, worker, envelope) VALUES (?, ?, ?)",
                    (index, verdict.worker, envelope.raw),
                )
                _derive(connection, [entry])

            written = await self._log.append([entry], keep)
        self._grown.set(written.stop)
        return envelope

    async def evict(
        self, peer: str, reason: str, submission: bytes, figure: float, threshold: float
    ) -> None:
        """Evict a peer from the run. The log makes the eviction durable before it is announced."""
        reason = reason[:500]
        eviction = Eviction(
            peer=peer, reason=reason, submission=submission, figure=figure, threshold=threshold
        )
        envelope = await self._peer.seal(eviction, EVICTION_LIFETIME_SECONDS)
        await self.append(
            [Evicted(peer=peer, reason=reason, submission=submission, envelope=envelope.raw)]
        )
        self._peer.gossip.publish(envelope)

    async def _admitted(self, peer: str, roles: Sequence[str]) -> None:
        """Log a peer's admission unless a log of a trusted peer already has one."""
        if not self._database.read("SELECT 1 FROM admitted WHERE peer = ? ORDER BY 1", (peer,)):
            await self.append([Admitted(peer=peer, roles=list(roles))])

    # --- reading -----------------------------------------------------------------------------

    def verdicts(self, newest: int) -> list[Envelope]:
        """Return the last `newest` verdicts of this peer, in log order."""
        rows = self._database.read(
            "SELECT envelope FROM (SELECT * FROM verdicts ORDER BY position DESC LIMIT ?) "
            "ORDER BY position",
            (newest,),
        )
        return [open_envelope(row[0]) for row in rows]

    def accepted_of(self, worker: str) -> int:
        """Count a worker's submissions that trusted peers have accepted."""
        rows = self._database.read(
            "SELECT COUNT(*) FROM accepted WHERE worker = ? ORDER BY 1", (worker,)
        )
        return int(rows[0][0])

    def used(self, submission: bytes) -> bool:
        """Whether a log records the final outcome of a submission; "carried" is not final."""
        rows = self._database.read(
            "SELECT 1 FROM used WHERE submission = ? ORDER BY 1", (submission,)
        )
        return bool(rows)

    def log_of(self, owner: str) -> Log | None:
        """Return this peer's log, or its mirror of another trusted peer's log."""
        if owner == self._peer.peer_id:
            return self._log
        if owner in self._run.manifest.trusted_ids():
            return LogMirror(self._database, owner).log
        return None

    async def head_of(self, owner: str) -> Envelope | None:
        """Return the newest signed head of a log that this peer holds."""
        if owner == self._peer.peer_id:
            return await self._head()
        return LogMirror(self._database, owner).head()

    def verdicts_of(self, worker: str, start: int, limit: int) -> list[tuple[int, bytes, bytes]]:
        """Return up to `limit` own verdicts on a worker from log index `start` on.

        Each is a tuple of log index, entry and envelope.
        """
        return [
            (position, entry, envelope)
            for position, entry, envelope in self._database.read(
                "SELECT v.position, e.entry, v.envelope FROM verdicts v JOIN entries e "
                "ON e.owner = ? AND e.position = v.position "
                "WHERE v.worker = ? AND v.position >= ? ORDER BY v.position LIMIT ?",
                (self._peer.peer_id, worker, start, limit),
            )
        ]

    def status(self) -> tuple[list[bytes], list[Present]]:
        """Return the newest manifest, checkpoint and step order, and the peers present.

        Anyone may ask, so the status is made at most every `STATUS_SECONDS`.
        """
        now = self._peer.node.world.now()
        made, status = self._status
        if now >= made + STATUS_SECONDS:
            status = ([newest.raw for newest in self._peer.newest()], self.registrar.present())
            self._status = (now, status)
        return status

    def expulsions_of(self, peer: str) -> list[bytes]:
        """Return one peer's newest signed eviction and reinstatement, in force or overruled."""
        return [envelope.raw for envelope in self._run.expulsions_of(peer)]

    async def _head(self) -> Envelope:
        """Return the signed head of the own log.

        It is signed again once the log has grown or half the signature's lifetime has passed.
        """
        size, root = self._log.head()
        signed = self._signed_head
        half_ms = STATE_LIFETIME_SECONDS * 500
        wall_ms = self._peer.node.world.wall_time() * 1000
        if (
            signed is None
            or signed.message != LogHead(size=size, root=root)
            or signed.body.issued_ms + half_ms < wall_ms
        ):
            signed = await self._peer.seal(LogHead(size=size, root=root), STATE_LIFETIME_SECONDS)
            self._signed_head = signed
        return signed

    # --- background --------------------------------------------------------------------------

    async def run(self) -> None:
        """Admit peers, serve the ledger, announce heads and mirror other logs, until cancelled.

        Raises `Fork` if this disk's log contradicts a head that this peer signed earlier. Raises
        `PeerError` if other peers have more entries of it and do not hand them over.
        """
        async with serving_ledger(self._peer.node.transport, self), trio.open_nursery() as nursery:
            nursery.start_soon(self.registrar.run)
            nursery.start_soon(self._follow_others)
            for (raw,) in self._database.read("SELECT envelope FROM expulsions ORDER BY envelope"):
                self._spread(raw)
            await self._restore()
            self._restored.set()
            nursery.start_soon(self._announce_heads)
            async for envelope in self._reinstatements:
                await self._log_reinstatement(envelope)

    async def _announce_heads(self) -> None:
        announced = 0
        while True:
            if self._log.size() == announced:
                await self._grown.wait_change()
                continue
            head = await self._head()
            announced = _size(head)
            self._peer.gossip.publish(head)
            await trio.sleep(LOG_HEAD_SECONDS)

    async def _restore(self) -> None:
        """Restore entries of this log that other trusted peers hold and this disk lacks."""
        me = self._peer.peer_id
        found: dict[PeerId, Envelope] = {}

        async def ask(other: PeerId) -> None:
            try:
                await self._peer.node.reach(other)
                async with open_ledger(self._peer.node.transport, other) as client:
                    head = await client.head(me)
            except (PeerError, Dropped):
                return  # it is down; another peer may answer
            if head is not None:
                found[other] = head

        with trio.move_on_after(RESTORE_SECONDS):
            async with trio.open_nursery() as nursery:
                for other in self._run.manifest.trusted_ids():
                    if other != me:
                        nursery.start_soon(ask, PeerId(other))
        held = self._log.size()
        for other, head in sorted(found.items()):
            assert isinstance(head.message, LogHead)
            size = head.message.size
            if size <= held and self._log.root(size) != head.message.root:
                raise Fork(
                    f"this peer's own log is not the one it signed a head of {size} entries for, "
                    f"which {other} holds; restore ledger.sqlite from a backup, or move it away "
                    "to have it restored from other trusted peers"
                )
        for other in sorted(found, key=lambda peer: (-_size(found[peer]), peer)):
            if _size(found[other]) <= self._log.size():
                break
            try:
                async with open_ledger(self._peer.node.transport, other) as client:
                    await self._pull(client, found[other])
            except PeerError as error:
                self._events.emit("ledger.restore_failed", remote=other, reason=str(error))
        known = max((_size(head) for head in found.values()), default=0)
        if self._log.size() < known:
            raise PeerError(
                f"{known - self._log.size()} entries of this peer's log are lost here, and none "
                f"of {', '.join(sorted(found))} provided them; start it again once they answer"
            )
        if self._log.size() > held:
            self._events.emit("ledger.restored", entries=self._log.size() - held)

    # --- mirroring ---------------------------------------------------------------------------

    def _on_head(self, envelope: Envelope) -> None:
        owner = envelope.sender
        if owner == self._peer.peer_id:
            return
        if owner in self._others:
            self._others[owner].set(envelope)
        else:
            self._others[owner] = Observable(envelope)
            self._heard_owner.send_nowait(owner)

    async def _follow_others(self) -> None:
        async with trio.open_nursery() as nursery:
            async for owner in self._owners:
                nursery.start_soon(self._follow, owner)

    async def _follow(self, owner: str) -> None:
        """Mirror one trusted peer's log until cancelled."""
        heads = self._others[owner]
        while True:
            head = heads.value
            try:
                await self._peer.node.reach(PeerId(owner))
                async with open_ledger(self._peer.node.transport, PeerId(owner)) as client:
                    await self._pull(client, head)
            except Fork as fork:
                self._events.emit("ledger.forked", owner=owner, reason=str(fork))
            except (PeerError, Dropped) as error:
                self._events.emit("ledger.mirror_failed", owner=owner, reason=str(error))
                await trio.sleep(RETRY_SECONDS)
                continue
            if heads.value is head:
                await heads.wait_change()

    async def _pull(self, client: LedgerClient, head: Envelope) -> None:
        """Extend the copy of a log up to a head signed by its owner.

        Raises `Fork` and `PeerError`.
        """
        owner = head.sender
        mirror = LogMirror(self._database, owner)
        size = _size(head)
        held = mirror.log.size()
        if held >= size:
            await mirror.extend(head, [])
        while held < size:
            raws = await client.entries(owner, held, size - held)
            try:
                entries = [decode(raw) for raw in raws]
            except ValueError as error:
                raise PeerError(f"{owner} has {error} in its log") from error
            held += len(raws)
            proof = await client.consistency(owner, held, size) if held < size else []

            def derive(connection: sqlite3.Connection, _: int, new: list[Entry] = entries) -> None:
                _derive(connection, new)

            await mirror.extend(head, raws, proof, derive)
            for entry in entries:
                if isinstance(entry, (Evicted, Reinstated)):
                    self._apply(entry.envelope)
                    self._spread(entry.envelope)

    # --- evictions and reinstatements --------------------------------------------------------

    def _on_reinstatement(self, envelope: Envelope) -> None:
        try:
            self._heard_reinstatement.send_nowait(envelope)
        except trio.WouldBlock:
            self._events.emit("ledger.reinstatement_not_logged", sequence=envelope.body.sequence)

    async def _log_reinstatement(self, envelope: Envelope) -> None:
        message = envelope.message
        assert isinstance(message, Reinstatement)
        known = self._database.read(
            "SELECT 1 FROM expulsions WHERE envelope = ? ORDER BY 1", (envelope.raw,)
        )
        if not known:
            await self.append(
                [Reinstated(peer=message.peer, reason=message.reason, envelope=envelope.raw)]
            )

    def _apply(self, raw: bytes) -> None:
        """Apply a signed eviction or reinstatement from a log, even an expired one."""
        try:
            envelope = open_envelope(raw)
        except Dropped as dropped:
            self._events.emit("ledger.bad_entry", reason=str(dropped))
            return
        if envelope.body.run != self._run.id:
            return
        if isinstance(envelope.message, Eviction):
            if envelope.sender in self._run.manifest.trusted_ids():
                self._run.evict(envelope)
        elif isinstance(envelope.message, Reinstatement) and envelope.sender == self._run.owner:
            self._run.reinstate(envelope)

    def _spread(self, raw: bytes) -> None:
        """Gossip a signed eviction or reinstatement from a log."""
        try:
            self._peer.gossip.publish(open_envelope(raw))
        except Dropped as dropped:  # expired, or no longer permitted; it stays in the log
            self._events.emit("ledger.not_spread", cause=dropped.cause)


def not_named(peer: Host, role: str) -> UserError:
    """Make the error of a peer that wants a trusted role but is not named in its manifest."""
    return UserError(
        f"the manifest of run {peer.run.id} does not name peer {peer.peer_id} as a {role}; "
        f"its owner must add that id to the manifest's {role}s, or use the --home that has the key"
    )


def _size(head: Envelope) -> int:
    assert isinstance(head.message, LogHead)
    return head.message.size


def _derive(connection: sqlite3.Connection, entries: Sequence[Entry]) -> None:
    """Update the derived tables with new entries of a log."""
    for entry in entries:
        if isinstance(entry, Judged) and entry.outcome == "accepted":
            connection.execute(
                "INSERT OR IGNORE INTO accepted (worker, submission) VALUES (?, ?)",
                (entry.worker, entry.submission),
            )
        elif isinstance(entry, Admitted):
            connection.execute("INSERT OR IGNORE INTO admitted (peer) VALUES (?)", (entry.peer,))
        elif isinstance(entry, Consumed) and set(entry.outcomes) != {"carried"}:
            connection.execute(
                "INSERT OR IGNORE INTO used (submission) VALUES (?)", (entry.submission,)
            )
        elif isinstance(entry, (Evicted, Reinstated)):
            connection.execute(
                "INSERT OR IGNORE INTO expulsions (envelope) VALUES (?)", (entry.envelope,)
            )
