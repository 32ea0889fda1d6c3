"""The shared part of trainers and validators: logs, their mirrors, admissions, evictions.

All durable state is in `ledger.sqlite`: this peer's log, its mirrors of the other trusted peers'
logs, and tables derived from their entries."""

import math
import sqlite3
from collections.abc import Awaitable, Callable, Sequence

import trio

from swarm.ledger.derived import DerivedTables, deriving, keep_verdict
from swarm.ledger.entries import Entry, Evicted, Reinstated, Sealed, judged
from swarm.ledger.faults import FaultStore
from swarm.ledger.log import Log
from swarm.ledger.mirror import LogMirror, forks_in
from swarm.ledger.serving import serving_ledger
from swarm.ledger.state import Authority
from swarm.ledger.wire import ForkEvidence
from swarm.node.log_copies import LogCopies
from swarm.node.node import Node
from swarm.node.sealing import Sealing
from swarm.run.invites import Invites
from swarm.run.lease import GOODBYE_SECONDS
from swarm.run.participant import Participant
from swarm.run.registrar import Registrar
from swarm.wire.envelope import STATE_LIFETIME_SECONDS, Dropped, Envelope, open_envelope
from swarm.wire.messages import Eviction, LogHead, Present, Reinstatement, StepOrder, Verdict
from swarm.world.observable import Observable

EVICTION_LIFETIME_SECONDS = 30 * 24 * 3600.0
"""Evictions are gossiped to newcomers for 30 days; the ledger keeps them for ever."""

VERDICT_LIFETIME_SECONDS = 600.0
"""Lifetime of a verdict: a trainer that was down for less receives it after its restart."""

UNGRADED = frozenset({"environment", "not_gradable"})
"""Failed checks of honest work that cannot be graded: no environment, or no known reward."""

UNGRADED_MAX = 5
"""Number of honest submissions in a row that a validator's environment fails to grade before the
validator turns work away. If no validator can grade, the trainer then pauses the run."""

LOG_HEAD_SECONDS = 2.0
"""Interval at which a trusted peer announces the head of its growing log. Others mirror the log
about as often, so a lost disk loses entries of about this time."""

STATUS_SECONDS = 1.0
"""Shortest interval at which the status is made anew, however many peers ask."""

REINSTATEMENTS_WAITING_MAX = 1000
"""Most received reinstatements that wait to be logged. An owner signs only a few."""


class TrustedPart:
    """The trusted side of one peer. Call `open()` first, then run `run()` in the background."""

    def __init__(
        self,
        node: Node,
        me: Participant,
        *,
        newest: Callable[[], list[Envelope]],
        evaluation: Callable[[], Envelope | None],
        has_work: Callable[[], bool],
    ) -> None:
        """`newest` returns the newest known manifest, checkpoint and step order, `evaluation` the
        newest result on held-out tasks. `has_work` says whether a step wants work."""
        run, gossip = me.run, me.gossip
        self._node = node
        self._run = run
        self._gossip = gossip
        self._seal = me.seal
        self._newest = newest
        self._evaluation = evaluation
        self._database = node.disk.database("ledger.sqlite")
        self.tables = DerivedTables(self._database, node.peer_id)
        self.faults = FaultStore(self._database, node.disk)
        self.invites = Invites(self._database, node.world, node.events, self.append)
        self._log = Log(self._database, node.peer_id)
        self._copies = LogCopies(
            node, run, gossip, self._database, self._log, on_expulsion=self._on_expulsion
        )
        self.sealing = Sealing(
            node, run, self._database, newest=self._newest_step, append=self._append_block
        )
        self._appending = trio.Lock()
        self._reinstating = trio.Lock()
        self._restored = trio.Event()
        """Set once this disk has all entries of this log that other trusted peers hold."""
        self._grown = Observable(0)
        """Size of the own log after this process's last append; 0 before the first."""
        self._signed_head: Envelope | None = None
        self._status: tuple[float, tuple[list[bytes], list[Present]]] = (-math.inf, ([], []))
        """Time of the last status, and the status."""
        self._authority_changed = Observable(None)
        """Changes when a newer manifest has other validators or rules than the tables follow."""
        self._heard_reinstatement, self._reinstatements = trio.open_memory_channel[Envelope](
            REINSTATEMENTS_WAITING_MAX
        )
        self.registrar = Registrar(
            me,
            stake=self._stake_now,
            invites=self.invites,
            secret=node.identity.sign(b"swarm/1/entry\x00" + run.id.encode()),
            has_work=has_work,
            vouch=node.transport.vouch,
            network_of=node.transport.network_of,
        )
        gossip.listen(Reinstatement, self._on_reinstatement)

    async def open(self) -> None:
        """Create the tables and apply the stored evictions and reinstatements."""
        await LogMirror.create_tables(self._database)
        await self.tables.create(self._authority())
        await self.faults.create()
        for raw in self.tables.expulsions():
            self._apply(raw)

    async def say_goodbye(self) -> None:
        """Publish a last digest, in which this peer's heartbeat says that it leaves."""
        with trio.move_on_after(GOODBYE_SECONDS):
            await self.registrar.publish_presence()
            await self._gossip.flush()

    def close(self) -> None:
        self._database.close()

    async def restored(self) -> None:
        """Wait until this disk has all entries of the own log that other trusted peers hold."""
        await self._restored.wait()

    async def catch_up(self, owners: Sequence[str]) -> None:
        """See `LogCopies.catch_up`."""
        await self._copies.catch_up(owners)

    # --- appending ---------------------------------------------------------------------------

    async def append(self, entries: list[Entry]) -> None:
        """Append entries to this peer's log; they are durable on return."""
        await self._restored.wait()
        async with self._appending:
            written = await self._log.append(entries, deriving(self._log.owner, entries))
        self._grown.set(written.stop)

    async def append_verdict(self, verdict_at: Callable[[int], Verdict]) -> Envelope:
        """Sign and append the verdict that `verdict_at` makes for its index in the log.

        One transaction makes the log entry and the envelope durable before the return, and with a
        proven fault the eviction, so that no restart comes between them."""
        await self._restored.wait()
        async with self._appending:
            verdict = verdict_at(self._log.size())
            envelope = await self._seal(verdict, VERDICT_LIFETIME_SECONDS)
            entries: list[Entry] = [judged(verdict)]
            eviction = None
            if verdict.proven_fault and self._run.evicted(verdict.worker) is None:
                reason, digest = f"proven fault: {verdict.detail}", verdict.submission
                eviction, entry = await self._eviction(verdict.worker, reason, digest, 1.0, 0.0)
                entries.append(entry)

            def keep(connection: sqlite3.Connection, index: int) -> None:
                assert index == verdict.log_index, "somebody else appended to this log"
                keep_verdict(connection, index, envelope)
                deriving(self._log.owner, entries)(connection, index)

            written = await self._log.append(entries, keep)
        self._grown.set(written.stop)
        if eviction is not None:
            self._gossip.publish(eviction)
        return envelope

    async def _append_block(self, work: Callable[[], Awaitable[tuple[range, Sealed]]]) -> Sealed:
        """Let a seal be appended to this peer's log in its turn."""
        await self._restored.wait()
        async with self._appending:
            written, seal = await work()
        self._grown.set(written.stop)
        return seal

    async def evict(
        self, peer: str, reason: str, submission: bytes, figure: float, threshold: float
    ) -> None:
        """Evict a peer from the run. The log makes the eviction durable before it is announced."""
        envelope, entry = await self._eviction(peer, reason, submission, figure, threshold)
        await self.append([entry])
        self._gossip.publish(envelope)

    async def _eviction(
        self, peer: str, reason: str, submission: bytes, figure: float, threshold: float
    ) -> tuple[Envelope, Evicted]:
        reason = reason[:500]
        eviction = Eviction(
            peer=peer, reason=reason, submission=submission, figure=figure, threshold=threshold
        )
        envelope = await self._seal(eviction, EVICTION_LIFETIME_SECONDS)
        entry = Evicted(peer=peer, reason=reason, submission=submission, envelope=envelope.raw)
        return envelope, entry

    # --- reading -----------------------------------------------------------------------------

    def trusts(self, peer: str) -> bool:
        """Return whether a peer is the run's owner, a trainer or a validator."""
        return self._run.trusts(peer)

    def admits(self, peer: str) -> bool:
        """Return whether a peer has a lease of this run now."""
        return self.registrar.has_lease(peer)

    def log_of(self, owner: str) -> Log | None:
        """Return this peer's log, or its mirror of another trusted peer's log."""
        if owner == self._node.peer_id:
            return self._log
        if owner in self._run.manifest.trusted_ids():
            return LogMirror(self._database, owner).log
        return None

    async def head_of(self, owner: str) -> Envelope | None:
        """Return the newest signed head of a log that this peer holds."""
        if owner == self._node.peer_id:
            return await self._head()
        return LogMirror(self._database, owner).head()

    def verdicts_of(self, worker: str, start: int, limit: int) -> list[tuple[int, bytes, bytes]]:
        """Return (log index, entry, envelope) of own verdicts on a worker from `start` on."""
        return self.tables.verdicts_of(worker, start, limit)

    def stake(self, worker: str, step: int) -> int:
        """Return a worker's stake before a submission for `step` (`swarm.ledger.record`)."""
        authority = self._authority()
        if not self.tables.follows(authority):
            self._authority_changed.touch()
        return self.tables.stake(worker, step, authority.rules.stake_steps)

    def _authority(self) -> Authority:
        return Authority.of(self._run.owners, self._run.manifest)

    def is_on_trial(self, worker: str) -> bool:
        """Whether a worker may have only one unjudged submission."""
        manifest = self._run.manifest
        if worker in manifest.trusted_ids() or not manifest.admissions.trial:
            return False
        return self._stake_now(worker) == 0

    def _stake_now(self, worker: str) -> int:
        return self.stake(worker, self._newest_step()[1])

    def _newest_step(self) -> tuple[int, int]:
        orders = [each.message for each in self._newest() if isinstance(each.message, StepOrder)]
        return (orders[0].lineage, orders[0].step) if orders else (0, 0)

    def status(self) -> tuple[list[bytes], list[Present]]:
        """Return the newest manifest, checkpoint and step order, and the peers present.

        Anyone may ask, so the status is made at most every `STATUS_SECONDS`."""
        now = self._node.world.now()
        made, status = self._status
        if now >= made + STATUS_SECONDS:
            status = ([newest.raw for newest in self._newest()], self.registrar.present())
            self._status = (now, status)
        return status

    def evaluation(self) -> bytes:
        """Return the newest result on held-out tasks; empty without one."""
        newest = self._evaluation()
        return newest.raw if newest is not None else b""

    def expulsions_of(self, peer: str) -> list[bytes]:
        """Return one peer's newest signed eviction and reinstatement, in force or overruled."""
        return [envelope.raw for envelope in self._run.expulsions_of(peer)]

    def forks(self) -> list[ForkEvidence]:
        """Return the contradictory heads of other trusted peers' logs that this peer received."""
        return forks_in(self._database)

    async def _head(self) -> Envelope:
        """Return the signed head of the own log.

        It is signed again once the log has grown or half the signature's lifetime has passed."""
        size, root = self._log.head()
        head = LogHead(size=size, root=root)
        signed = self._signed_head
        half_a_life_ago_ms = (self._node.world.wall_time() - STATE_LIFETIME_SECONDS / 2) * 1000
        if signed is None or signed.message != head or signed.body.issued_ms < half_a_life_ago_ms:
            signed = self._signed_head = await self._seal(head, STATE_LIFETIME_SECONDS)
        return signed

    # --- background --------------------------------------------------------------------------

    async def run(self) -> None:
        """Admit peers, serve, announce and mirror logs until cancelled. Raises as `restore`."""
        async with serving_ledger(self._node.transport, self), trio.open_nursery() as nursery:
            nursery.start_soon(self.registrar.run)
            nursery.start_soon(self._copies.follow)
            nursery.start_soon(self._follow_authority)
            for raw in self.tables.expulsions():
                self._spread(raw)
            await self._copies.restore()
            self._restored.set()
            nursery.start_soon(self._announce_heads)
            nursery.start_soon(self.sealing.run)
            async for envelope in self._reinstatements:
                await self._log_reinstatement(envelope)

    async def _follow_authority(self) -> None:
        """Compute the balances again when the owner has changed validators or rules."""
        while True:
            authority = self._authority()
            if not self.tables.follows(authority):
                await self.tables.follow(authority)
            else:
                await self._authority_changed.wait_change()

    async def _announce_heads(self) -> None:
        announced = 0
        while True:
            if self._log.size() == announced:
                await self._grown.wait_change()
                continue
            head = await self._head()
            announced = head.expect(LogHead).size
            self._gossip.publish(head)
            await trio.sleep(LOG_HEAD_SECONDS)

    # --- evictions and reinstatements --------------------------------------------------------

    async def reinstate(self, raw: bytes) -> None:
        """Log and spread a reinstatement that anyone brings; it is durable on return.

        Raises `ValueError` unless the owner of this run signed it."""
        try:
            envelope = open_envelope(raw)
        except Dropped as dropped:
            raise ValueError(f"the reinstatement is not valid ({dropped})") from dropped
        is_owners = envelope.sender == self._run.owner and envelope.body.run == self._run.id
        if not (isinstance(envelope.message, Reinstatement) and is_owners):
            raise ValueError("this is no reinstatement signed by the owner of this run")
        if not self.tables.has_expulsion(raw):
            try:
                self._gossip.publish(envelope)  # `_on_reinstatement` hears it too
            except Dropped as dropped:
                raise ValueError(f"the reinstatement is not valid ({dropped})") from dropped
        await self._log_reinstatement(envelope)

    def _on_reinstatement(self, envelope: Envelope) -> None:
        try:
            self._heard_reinstatement.send_nowait(envelope)
        except trio.WouldBlock:
            self._node.events.emit(
                "ledger.reinstatement_not_logged", sequence=envelope.body.sequence
            )

    async def _log_reinstatement(self, envelope: Envelope) -> None:
        message = envelope.expect(Reinstatement)
        async with self._reinstating:
            if not self.tables.has_reinstatement(envelope.raw):
                await self.append(
                    [Reinstated(peer=message.peer, reason=message.reason, envelope=envelope.raw)]
                )

    def _on_expulsion(self, raw: bytes) -> None:
        self._apply(raw)
        self._spread(raw)

    def _apply(self, raw: bytes) -> None:
        """Apply a signed eviction or reinstatement from a log, even an expired one."""
        try:
            envelope = open_envelope(raw)
        except Dropped as dropped:
            self._node.events.emit("ledger.bad_entry", reason=str(dropped))
            return
        if envelope.body.run != self._run.id:
            return
        if isinstance(envelope.message, Eviction):
            if envelope.sender in self._run.manifest.trusted_ids():
                self._run.expel(envelope)
        elif isinstance(envelope.message, Reinstatement) and envelope.sender in self._run.owners:
            self._run.expel(envelope)
            self._on_reinstatement(envelope)  # the own log has it, too: it cuts off evidence there

    def _spread(self, raw: bytes) -> None:
        try:
            self._gossip.publish(open_envelope(raw))
        except Dropped as dropped:  # expired, or no longer permitted; it stays in the log
            self._node.events.emit("ledger.not_spread", cause=dropped.cause)
