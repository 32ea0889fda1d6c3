"""One peer put together: identity, transport, DHT; and, inside a run, everything the roles use.

`Node` is a peer that takes part in the network. `RunNode` is a node that has joined one run; a
role gets it and adds its loop (`swarm.roles`).
"""

from __future__ import annotations

import math
import sqlite3
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeAlias

import trio
from blake3 import blake3

from swarm import __version__, defaults
from swarm.changes import changes
from swarm.envelope import Dropped, Envelope, Gate, Sequencer, open_envelope, seal
from swarm.errors import PeerError, UserError, leaf_errors
from swarm.events import Events
from swarm.gossip import RUN, Gossip
from swarm.identity import Identity, PeerId
from swarm.kademlia.dht import Kademlia
from swarm.membership import Lease, NotAdmitted, TrustedClock, admits
from swarm.messages import (
    DOING_CHARACTERS_MAX,
    Checkpoint,
    Eviction,
    Heartbeat,
    Message,
    PeerRecord,
    Presence,
    Reinstatement,
    RunManifest,
    StepOrder,
)
from swarm.messenger import Messenger
from swarm.run import (
    BOOTSTRAP_SECONDS,
    VERSION_REFUSED,
    Run,
    ask_for_manifests,
    checkpoint_key,
    choose_run,
    content_digest,
    manifest_in,
    peer_key,
    pin_owner,
    record_validators,
    run_key,
    serve_manifests,
)
from swarm.settings import PeerSettings
from swarm.shardcast.chain import Deltas
from swarm.shardcast.fetch import Fetcher
from swarm.shardcast.have import HaveExchange
from swarm.shardcast.manifest import BadManifest
from swarm.shardcast.service import BlobService, PushPolicy
from swarm.shardcast.store import CheckpointConflict, CheckpointStore
from swarm.shardcast.uploads import Uploads
from swarm.transport import (
    BlobReference,
    ConnectError,
    DialFailure,
    Reachability,
    Refused,
    Source,
    Transport,
)
from swarm.trusted import TrustedPart, not_named
from swarm.watch import Watched
from swarm.world import Compute, Database, Disk, Piece, Sink, World

LAST_BOOTSTRAP = "last-bootstrap"
"""File in the home with the addresses this peer last joined through: `swarm status` asks there."""

PEERS_MET = "peers-met"
"""File in the home with addresses of peers this one is connected to: ways into the network while
its bootstrap peers are away."""

PEERS_MET_MAX = 16

MET_AFTER_SECONDS = 2.0
"""Bootstrap peers have so long to themselves before peers met earlier are tried as well."""

ENTRY_GRACE_SECONDS = 1.0
"""After one way into the network is found, the others that are tried have so long."""

NEWER_MANIFEST_SECONDS = 1.0
"""A peer that joins looks so long in the DHT for a newer manifest than it was given."""

EntryPoints: TypeAlias = Mapping[PeerId, Sequence[str]]
"""Peers through which one joins, with their addresses."""

RECORDS_MAX = 1024
"""Peer records remembered (about 0.5 KB each)."""

RECORD_BYTES_MAX = 11 * 1024
"""A larger one is not remembered: 16 + 16 addresses of 300 characters fit, and 16 records fit the
frame in which they are handed on."""

SOURCES_MAX = 64
"""Peers considered as sources of one checkpoint."""

SOURCES_NEAR_MAX = 48
"""Of those, neighbours and others preferred; the rest is drawn, so that liars that connect in
numbers are never the only ones."""

NEIGHBOUR_SEARCH_SECONDS = 3.0
"""Between attempts to find more gossip neighbours."""

NEIGHBOUR_CHECK_SECONDS = 10.0
"""After which a peer that had enough looks whether it still has."""

CLAIM_SECONDS = 1.0
"""For neighbours to say that they have a checkpoint, before the DHT is asked who has: a new one
comes from neighbour to neighbour about as fast as a lookup goes."""

PROVIDE_SECONDS = 30.0
"""Between provider records of this peer's newest checkpoint: neighbours learn of pieces at once
by HAVE, the DHT only serves newcomers."""

PROVIDERS_WANTED = 64
"""About so many inference peers are named as sources of a checkpoint."""

VERSION_SECONDS = 2.0
"""Between two rounds of asking for a version of the run that a step order names."""
VERSION_COMPLAINT_SECONDS = 30.0
"""How often it is said that nobody has it."""

EVICTION_NOTICE_SECONDS = 2.0
"""An evicted peer is disconnected this long after the eviction, so that it hears the reason."""

RELAY_AFTER_SECONDS = 30.0
"""A peer that nobody has reached directly by then asks relays to carry connections to it."""

RELAYS_USED = 2


def _moment(wall_seconds: float) -> str:
    """A wall time for people."""
    return datetime.fromtimestamp(wall_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class StoredSequence:
    """The sequence number in the peer's own database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self) -> int:
        rows = self._database.read("SELECT value FROM sequence WHERE id = 0 ORDER BY id")
        return int(rows[0][0]) if rows else 0

    async def save(self, value: int) -> None:
        await self._database.transact(
            lambda connection: connection.execute(
                "INSERT INTO sequence (id, value) VALUES (0, ?) "
                "ON CONFLICT (id) DO UPDATE SET value = excluded.value",
                (value,),
            )
        )


def create_tables(connection: sqlite3.Connection) -> None:
    """What a node keeps in its database."""
    connection.execute(
        "CREATE TABLE IF NOT EXISTS sequence (id INTEGER PRIMARY KEY, value INTEGER NOT NULL)"
    )
    connection.execute(
        "CREATE TABLE IF NOT EXISTS manifests (run TEXT NOT NULL, version INTEGER NOT NULL, "
        "digest BLOB NOT NULL, envelope BLOB NOT NULL, PRIMARY KEY (run, digest)) WITHOUT ROWID"
    )


@dataclass
class Node:
    """A peer in the network: what it needs whether or not it has joined a run."""

    identity: Identity
    world: World
    disk: Disk
    compute: Compute
    transport: Transport
    dht: Kademlia
    events: Events
    settings: PeerSettings
    database: Database
    sequencer: Sequencer
    manifests: dict[str, Envelope] = field(default_factory=dict)
    """Signed run manifests this peer hands out, by run id."""
    part: RunNode | None = None
    """Its part in a run, once it has one."""
    _records: OrderedDict[str, Envelope] = field(default_factory=OrderedDict)
    _refused: dict[str, RunManifest] = field(default_factory=dict)
    """The last manifest of each run that was not taken."""
    _met: dict[PeerId, list[str]] = field(default_factory=dict)
    """Those on disk."""

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    async def seal(self, message: Message, lifetime_seconds: float, run: str = "") -> Envelope:
        """Sign a message as this peer."""
        return seal(
            self.identity,
            message,
            run=run,
            sequence=await self.sequencer.next(),
            wall_time=self.world.wall_time(),
            lifetime_seconds=lifetime_seconds,
        )

    # --- run manifests -----------------------------------------------------------------------

    def serve_manifests(self) -> None:
        """Hand out the manifests known here to whoever asks, and take newer ones."""
        serve_manifests(
            self.transport,
            newest=lambda: list(self.manifests.values()),
            version=self.version,
            hear=self.hear_manifest,
        )

    def version(self, digest: bytes) -> Envelope | None:
        """The version of a run's manifest with this content, if it is known here."""
        if self.part is not None and (held := self.part.run.version(digest)) is not None:
            return held
        known = (e for e in self.manifests.values() if content_digest(e) == digest)
        return next(known, None)

    def hear_manifest(self, envelope: Envelope) -> Envelope | None:
        """Take a newer manifest of a run known here; the newest known after that, if any."""
        run = envelope.body.run
        if self.part is not None and self.part.run.id == run:
            self.part.hear_manifest(envelope)
        elif run in self.manifests:
            known = Run(self.manifests[run])
            self.take_version(known, envelope)
            self.manifests[run] = known.manifest_envelope
        return self.manifests.get(run)

    def take_version(self, run: Run, envelope: Envelope) -> None:
        """Take a newer manifest of a run, and say what changes; or why it is not taken."""
        held, new = run.manifest, manifest_in(envelope)
        self.say_refused(run, new)
        if run.update(envelope):
            listed = [str(change) for change in changes(held, new)]
            self.events.emit("run.version_signed", version=new.version, changes=listed)

    def say_refused(self, run: Run, manifest: RunManifest) -> None:
        """Say why a manifest is not taken, if it is not; once, however often it comes."""
        reason = run.refusal(manifest)
        if reason is not None and self._refused.get(run.id) != manifest:
            self._refused[run.id] = manifest
            self.events.emit("run.version_refused", version=manifest.version, reason=reason)

    def stored_versions(self, run: str) -> list[Envelope]:
        """The versions of a run that this peer remembers from earlier lives, the newest last."""
        rows = self.database.read(
            "SELECT envelope FROM manifests WHERE run = ? ORDER BY version, digest", (run,)
        )
        return [open_envelope(raw) for (raw,) in rows]

    async def store_versions(self, run: str, versions: Sequence[Envelope]) -> None:
        """Make versions of a run durable, in place of those stored before."""
        rows = [
            (run, manifest_in(each).version, content_digest(each), each.raw) for each in versions
        ]

        def store(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM manifests WHERE run = ?", (run,))
            connection.executemany(
                "INSERT INTO manifests (run, version, digest, envelope) VALUES (?, ?, ?, ?)", rows
            )

        await self.database.transact(store)

    # --- where peers are ---------------------------------------------------------------------

    def learn_record(self, envelope: Envelope) -> None:
        """Remember a peer record (its signature is checked already); the newest counts."""
        if len(envelope.raw) > RECORD_BYTES_MAX:
            return  # padded
        held = self._records.get(envelope.sender)
        if held is None or held.body.sequence < envelope.body.sequence:
            self._records[envelope.sender] = envelope
            self._records.move_to_end(envelope.sender)
            if len(self._records) > RECORDS_MAX:
                # Identities are free: however many are told of, those met stay.
                met = {self.peer_id, *self.transport.connected()}
                oldest = next(iter(self._records))
                del self._records[next((p for p in self._records if p not in met), oldest)]

    def record(self, peer: str) -> PeerRecord | None:
        """The newest record known of a peer."""
        envelope = self._records.get(peer)
        if envelope is None:
            return None
        assert isinstance(envelope.message, PeerRecord)
        return envelope.message

    def records(self) -> list[Envelope]:
        """All records known, own one included, those newest here last."""
        return list(self._records.values())

    async def find_record(self, peer: PeerId) -> PeerRecord | None:
        """The record of a peer that the DHT holds, remembered from now on."""
        raw = await self.dht.get(peer_key(peer))
        if raw is None:
            return None
        envelope = open_envelope(raw)
        self.learn_record(envelope)
        assert isinstance(envelope.message, PeerRecord)
        return envelope.message

    async def reach(self, peer: PeerId) -> None:
        """Be connected to a peer: by the addresses known, else by those the DHT gives.

        Raises `PeerError` naming the peer.
        """
        if peer in self.transport.connected():
            return
        record = self.record(peer)
        if record is not None:
            try:
                await self.transport.connect(peer, record.addresses)
                return
            except PeerError:
                self._records.pop(peer, None)
        record = await self.find_record(peer)
        addresses: Sequence[str] = record.addresses if record is not None else ()
        if not addresses:
            addresses = await self.dht.find_peer(peer)
        if not addresses:
            raise PeerError(f"no address of {peer} is known to the DHT")
        await self.transport.connect(peer, addresses)

    async def _remember_peers(self) -> None:
        """Keep on disk where some of the peers connected are, the run's trusted ones first."""
        connected = {
            peer: addresses
            for peer in self.transport.connected()
            if (addresses := self._addresses_of(peer))
        }
        if self._met.items() <= connected.items() and (
            len(self._met) in (PEERS_MET_MAX, len(connected))
        ):
            return
        trusted = self.part.run.manifest.trusted_ids() if self.part is not None else []
        chosen = sorted(connected, key=lambda peer: (peer not in trusted, peer))[:PEERS_MET_MAX]
        self._met = {peer: connected[peer] for peer in chosen}
        lines = [address for addresses in self._met.values() for address in addresses]
        await self.disk.write(PEERS_MET, "\n".join(lines).encode())

    def _addresses_of(self, peer: PeerId) -> list[str]:
        """Where a peer is: by its record, else as the DHT has it."""
        record, contact = self.record(peer), self.dht.table.get(peer)
        if record is not None:
            return record.addresses
        return list(contact.addresses) if contact is not None else []

    async def publish_record(self) -> None:
        """Keep this peer's record in the DHT, until cancelled; none while its run hides it."""
        published: tuple[list[str], list[str]] | None = None
        until = 0.0
        while True:
            addresses = (list(self.transport.addresses()), list(self.transport.bulk_addresses()))
            if self.part is not None and not self.part.passes_on:
                self.dht.withdraw(peer_key(self.peer_id))
                published = None
            elif addresses != published or self.world.now() >= until:
                record = PeerRecord(
                    roles=self.settings.role,
                    addresses=addresses[0][:16],
                    bulk_addresses=addresses[1][:16],
                    agent=f"swarm/{__version__}",
                )
                envelope = await self.seal(record, defaults.PEER_RECORD_LIFETIME_SECONDS)
                self.learn_record(envelope)
                await self.dht.put(peer_key(self.peer_id), envelope.raw)
                published = addresses
                until = self.world.now() + defaults.PEER_RECORD_LIFETIME_SECONDS / 2
            await self._remember_peers()
            await trio.sleep(defaults.HEARTBEAT_SECONDS)


@asynccontextmanager
async def assemble(
    identity: Identity,
    *,
    world: World,
    disk: Disk,
    compute: Compute,
    transport: Transport,
    events: Events,
    settings: PeerSettings,
    manifests: Mapping[str, Envelope],
) -> AsyncIterator[Node]:
    """A node from the parts of the seam, its DHT and its manifests served inside the block."""
    database = disk.database("peer.sqlite")
    await database.transact(create_tables)
    dht = Kademlia(transport, world, record_validators(world.wall_time), emit=events.emit)
    async with trio.open_nursery() as nursery:
        await nursery.start(dht.run)
        node = Node(
            identity=identity,
            world=world,
            disk=disk,
            compute=compute,
            transport=transport,
            dht=dht,
            events=events,
            settings=settings,
            database=database,
            sequencer=Sequencer(StoredSequence(database), world.wall_time),
            manifests=dict(manifests),
        )
        node.serve_manifests()
        events.emit(
            "peer.listening",
            roles=settings.role,
            addresses=list(transport.addresses()),
            bulk=list(transport.bulk_addresses()),
        )
        try:
            yield node
        finally:
            nursery.cancel_scope.cancel()
            database.close()


LOOKED_FOR = frozenset({"bootstrap", "relay", "trainer", "validator"})
"""Roles of peers that others connect to: these may wait for them."""

NO_WAY_IN = "no way into the network: give --bootstrap MULTIADDR (a running peer prints its own)"


async def join_network(node: Node) -> EntryPoints:
    """Connect to the bootstrap peers, not to the DHT yet: a run may hide its peers. Those that
    answered. When the bootstrap peers of the last time do not, peers met then do as well.

    Raises `UserError` when none answers within `BOOTSTRAP_DEADLINE_SECONDS`, or when no address is
    known and nobody would look for this peer.
    """
    named = _by_peer(node.settings.bootstrap)
    failures = [
        DialFailure(address, "that is this peer itself", "give the address of another peer")
        for address in named.pop(node.peer_id, ())
    ]
    met = await _peers_met(node)
    if not node.settings.bootstrap:
        answered = await _connect(node, met, [])
        if not answered and not LOOKED_FOR.intersection(node.settings.role):
            raise UserError(NO_WAY_IN)
        return answered
    patience_seconds = MET_AFTER_SECONDS if met else defaults.BOOTSTRAP_DEADLINE_SECONDS
    answered = await _connect(node, named, failures, patience_seconds=patience_seconds)
    if not answered and met:
        answered = await _connect(node, {**met, **named}, failures)
        if answered and not answered.keys() & named.keys():
            node.events.emit("dht.joined_through_others", peers=len(answered))
    if not answered:
        failed = {failure.address: failure for failure in failures}
        silent = f"no answer within {defaults.BOOTSTRAP_DEADLINE_SECONDS:g} s"
        told = [
            failed.get(address) or DialFailure(address, silent)
            for address in node.settings.bootstrap
        ]
        raise UserError(
            "no bootstrap peer can be reached: "
            + "; ".join(f"{failure} ({failure.advice})" for failure in told)
        )
    await node.disk.write(LAST_BOOTSTRAP, "\n".join(node.settings.bootstrap).encode())
    return answered


async def _connect(
    node: Node,
    peers: EntryPoints,
    failures: list[DialFailure],
    *,
    patience_seconds: float = defaults.BOOTSTRAP_DEADLINE_SECONDS,
) -> EntryPoints:
    """Those of these peers that answer: within a second of the first, or in all this time."""

    async def connect(peer: PeerId, addresses: Sequence[str]) -> None:
        try:
            await node.transport.connect(peer, addresses)
        except ConnectError as error:
            failures.extend(error.failures)
            node.events.emit("dht.bootstrap_silent", remote=peer, reason=str(error))
        else:
            scope.deadline = min(scope.deadline, trio.current_time() + ENTRY_GRACE_SECONDS)

    with trio.move_on_after(patience_seconds) as scope:
        async with trio.open_nursery() as nursery:
            for peer, addresses in peers.items():
                nursery.start_soon(connect, peer, addresses)
    connected = node.transport.connected()
    return {peer: addresses for peer, addresses in peers.items() if peer in connected}


async def _peers_met(node: Node) -> EntryPoints:
    """Peers that this one was connected to in its last life, if that joined through the same
    bootstrap peers."""
    last, met = [
        (await node.disk.read(name)).decode().split() if node.disk.exists(name) else []
        for name in (LAST_BOOTSTRAP, PEERS_MET)
    ]
    return _by_peer(met) if last == list(node.settings.bootstrap) else {}


def _by_peer(addresses: Sequence[str]) -> dict[PeerId, list[str]]:
    found: dict[PeerId, list[str]] = {}
    for address in addresses:
        found.setdefault(PeerId(address.rpartition("/p2p/")[2]), []).append(address)
    return found


async def join_dht(node: Node, entry_points: EntryPoints) -> None:
    """Enter the DHT through peers that answered."""
    answered = [address for addresses in entry_points.values() for address in addresses]
    if not answered:
        return
    with trio.move_on_after(defaults.BOOTSTRAP_DEADLINE_SECONDS):
        try:
            await node.dht.bootstrap(answered, node.settings.bootstrap)
        except PeerError as error:
            node.events.emit("dht.bootstrap_failed", reason=str(error))


async def find_run(node: Node, entry_points: EntryPoints, *, looks_on: bool = False) -> Run:
    """The run to join, from manifest files or from the peers that answered; enters the DHT, as
    the run's mode wants it. Raises `UserError`.

    An onlooker does not serve the DHT, nor look there for a newer manifest: it asks the trusted
    peers next, who know.
    """
    known = dict(node.manifests)
    problems: list[str] = []

    async def ask(peer: PeerId) -> None:
        try:
            for envelope in await ask_for_manifests(node.transport, peer):
                held = known.get(envelope.body.run)
                assert isinstance(envelope.message, RunManifest)
                if held is None or held.message.order() < envelope.message.order():
                    known[envelope.body.run] = envelope
                scope.deadline = min(scope.deadline, trio.current_time() + ENTRY_GRACE_SECONDS)
        except PeerError as error:
            problems.append(str(error))

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            for peer in entry_points:
                nursery.start_soon(ask, peer)
    if not known and problems:
        raise UserError(f"no run manifest could be had: {'; '.join(problems)}")
    manifest = choose_run([known[run] for run in sorted(known)], node.settings.run)
    node.dht.serving = not looks_on and Run(manifest).passes_on(node.peer_id, node.settings.role)
    await join_dht(node, entry_points)
    raw = None
    if not looks_on:
        # A lookup may meet peers that hang; what it would find, neighbours tell soon as well.
        with trio.move_on_after(NEWER_MANIFEST_SECONDS):
            raw = await node.dht.get(run_key(manifest.body.run))
    if raw is not None:
        newer = open_envelope(raw)
        if newer.body.run == manifest.body.run:
            manifest = max(manifest, newer, key=lambda e: e.message.order())
    await pin_owner(node.disk, manifest)
    stored = node.stored_versions(manifest.body.run)
    run = Run(stored[-1] if stored else manifest, stored[:-1])
    node.take_version(run, manifest)
    node.manifests[run.id] = run.manifest_envelope
    return run


@dataclass
class Status:
    """What this peer says of itself in its heartbeats; the roles keep it up to date."""

    policy: int = -1
    step: int = -1
    doing: str = "starting"
    tokens_per_second: float = 0.0
    changed: Watched[None] = field(default_factory=lambda: Watched(None))

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if "changed" in self.__dict__:
            self.changed.touch()


class _Pushes:
    """What this peer accepts when others push: nothing, until a role says so."""

    def __init__(self) -> None:
        self.policy: PushPolicy | None = None

    def accept(self, client: PeerId | None, reference: BlobReference) -> Sink:
        return self._policy().accept(client, reference)

    async def received(
        self, client: PeerId | None, reference: BlobReference, sink: Sink, piece: Piece
    ) -> None:
        await self._policy().received(client, reference, sink, piece)

    def _policy(self) -> PushPolicy:
        if self.policy is None:
            raise Refused(503, "this peer takes no submissions, or not yet")
        return self.policy


class RunNode:
    """A node inside one run: gate, gossip, messenger, membership, checkpoints."""

    def __init__(self, node: Node, run: Run, topics: Sequence[str] = (RUN,)) -> None:
        self.node = node
        node.part = self
        self.run = run
        self.status = Status()
        self.gate = Gate(node.world, run.id, self._permits, run.trusts, run.clock_off)
        self._clock = TrustedClock(run, node.world, node.events, node.peer_id)
        self.gossip = Gossip(
            node.transport,
            node.world,
            self.gate,
            node.events,
            run.id,
            topics,
            records=self._records_told,
            learn_record=node.learn_record,
            admits=lambda peer, shown: admits(run, peer, shown, node.world.wall_time()),
            compare_clock=self._clock.compare,
        )
        self.messenger = Messenger(node.transport, self.gate, node.events)
        self.checkpoint: Watched[Envelope | None] = Watched(None)
        """Newest checkpoint announced by a trainer of the run."""
        self.order: Watched[Envelope | None] = Watched(None)
        """Newest step order."""
        self.versions = Watched(0)
        """Changes when a version of the run's manifest is taken."""
        self._stored: list[Envelope] = []
        self._asking_for_version = trio.Lock()
        self.gossip.listen(Presence, self._clock.on_presence)
        self.gossip.listen(RunManifest, self._on_manifest)
        self.gossip.listen(Checkpoint, lambda e: self._newest(self.checkpoint, e))
        self.gossip.listen(StepOrder, self._on_order)
        self.gossip.listen(Eviction, self._on_eviction)
        self.gossip.listen(Reinstatement, run.reinstate)
        self.store = CheckpointStore(
            node.disk,
            run.id,
            node.events,
            keep=self._checkpoints_kept(),
            quota_bytes=node.settings.quota_bytes,
        )
        self.uploads = Uploads(node.world, node.transport, self.store)
        self.have = HaveExchange(
            node.world,
            node.transport,
            self.store,
            node.events,
            uploads=self.uploads,
            meet=self._meet,
            tells=lambda: self.passes_on,
        )
        self.deltas = Deltas(self.store, node.compute, node.events)
        self.fetcher = Fetcher(
            node.world,
            node.transport,
            self.store,
            node.events,
            have=self.have,
            deltas=self.deltas,
        )
        self.pushes = _Pushes()
        self.blobs = BlobService(
            self.admits, store=self.store, uploads=self.uploads, pushes=self.pushes
        )
        self._providers: dict[bytes, list[Source]] = {}
        self._lot = b""
        """Secret, drawn when first needed: decides which of many peers are sources."""
        self._evicted: Watched[Eviction | None] = Watched(None)
        self._heard_eviction, self._evictions = trio.open_memory_channel[tuple[PeerId, float]](
            math.inf  # as many as trusted peers sign
        )
        """Who is evicted, and when that was heard."""
        self.lease: Lease | None = None
        self._trusted: TrustedPart | None = None
        self._obey_mode()
        self._vouch_for_trusted()
        if node.peer_id in run.manifest.trusted_ids():
            self._trusted = TrustedPart(self)
        else:
            self.lease = Lease(
                run,
                self.messenger,
                node.world,
                node.events,
                peer_id=node.peer_id,
                seal=self.seal,
                reach=node.reach,
                describe=self.describe,
                granted=self._on_granted,
            )

    @property
    def peer_id(self) -> PeerId:
        return self.node.peer_id

    def trusted_part(self, role: str) -> TrustedPart:
        """The log and all else that this peer's trusted roles share.

        Raises `UserError` when the manifest does not name this peer for `role` ("trainer",
        "validator").
        """
        if self._trusted is None:
            raise not_named(self, role)
        self._trusted.check_role(role)
        return self._trusted

    async def seal(self, message: Message, lifetime_seconds: float) -> Envelope:
        """Sign a message of this run."""
        return await self.node.seal(message, lifetime_seconds, self.run.id)

    def say_starved(self, role: str, seconds: float, reason: str, waiting_for: list[str]) -> None:
        """Say that a role has had nothing to work on, why, and whom it waits for."""
        connected = self.node.transport.connected()
        self.node.events.emit(
            f"{role}.starved",
            seconds=seconds,
            reason=reason,
            waiting_for=waiting_for,
            not_connected=[peer for peer in waiting_for if peer not in connected],
        )

    async def announce(self, message: Message, lifetime_seconds: float) -> Envelope:
        """Sign a message and gossip it."""
        envelope = await self.seal(message, lifetime_seconds)
        self.gossip.publish(envelope)
        return envelope

    def describe(self) -> Heartbeat:
        """This peer's heartbeat, as of now."""
        moved = self.node.transport.bulk_bytes()
        return Heartbeat(
            roles=self.node.settings.role,
            policy=self.status.policy,
            step=self.status.step,
            doing=self.status.doing[:DOING_CHARACTERS_MAX],
            tokens_per_second=self.status.tokens_per_second,
            bytes_sent=moved.sent,
            bytes_received=moved.received,
        )

    def admits(self, peer: PeerId | None, credential: bytes) -> bool:
        """Whether a client of the bulk plane may use it."""
        if not self.passes_on and peer not in self.run.manifest.trusted_ids():
            return False
        admitted = admits(self.run, peer, credential, self.node.world.wall_time())
        if admitted and peer is not None:
            self.node.transport.vouch(peer, defaults.ADMISSION_LEASE_SECONDS)
        return admitted

    # --- who deals with whom -----------------------------------------------------------------

    @property
    def passes_on(self) -> bool:
        """Whether this peer passes on what it has. One that does not is a client: it asks, and is
        not to be found."""
        return self.run.passes_on(self.peer_id, self.node.settings.role)

    def _obey_mode(self) -> None:
        self.node.dht.serving = self.passes_on

    def _vouch_for_trusted(self) -> None:
        for peer in self.run.manifest.trusted_ids():
            self.node.transport.vouch(PeerId(peer), math.inf)

    def _is_dealt_with(self, peer: str, record: PeerRecord) -> bool:
        """Whether a peer is asked for pieces, connected to and named to others."""
        return self.run.evicted(peer) is None and self.run.passes_on(peer, record.roles)

    def _others(self) -> dict[PeerId, PeerRecord]:
        """The peers heard of that this one deals with."""
        found = {}
        for envelope in self.node.records():
            assert isinstance(envelope.message, PeerRecord)
            if envelope.sender != self.peer_id and self._is_dealt_with(
                envelope.sender, envelope.message
            ):
                found[PeerId(envelope.sender)] = envelope.message
        return found

    def _records_told(self) -> list[Envelope]:
        """Peer records for neighbours."""
        told = []
        for envelope in self.node.records():
            assert isinstance(envelope.message, PeerRecord)
            if self.run.passes_on(envelope.sender, envelope.message.roles):
                told.append(envelope)
        return told

    # --- the trainer's word ------------------------------------------------------------------

    @staticmethod
    def _newest(watched: Watched[Envelope | None], envelope: Envelope) -> None:
        held = watched.value
        if held is None or held.message.order() < envelope.message.order():
            watched.set(envelope)

    def newest_checkpoint(self) -> Checkpoint | None:
        envelope = self.checkpoint.value
        if envelope is None:
            return None
        assert isinstance(envelope.message, Checkpoint)
        return envelope.message

    def step_order(self) -> StepOrder | None:
        """The order in force: the newest one of any trainer."""
        envelope = self.order.value
        if envelope is None:
            return None
        assert isinstance(envelope.message, StepOrder)
        return envelope.message

    def _on_order(self, envelope: Envelope) -> None:
        before = self.step_order()
        self._newest(self.order, envelope)
        order = self.step_order()
        assert order is not None
        if before is not None and before.run_digest != order.run_digest:
            self.node.events.emit(
                "run.version_in_force", version=order.run_version, step=order.step
            )

    # --- versions of the run -----------------------------------------------------------------

    def _permits(self, sender: str, message: Message) -> str | None:
        cause = self.run.permits(sender, message)
        if cause == VERSION_REFUSED:
            assert isinstance(message, RunManifest)
            self.node.say_refused(self.run, message)
        return cause

    def hear_manifest(self, envelope: Envelope) -> None:
        """Take and spread a newer manifest of this run that came another way than by gossip."""
        try:
            self.gossip.publish(envelope)
        except Dropped as dropped:
            if dropped.cause != VERSION_REFUSED:  # that was said
                self.node.events.emit("gossip.manifest_dropped", cause=dropped.cause)

    def _on_granted(self, admission: Envelope) -> None:
        self.node.transport.set_credential(admission.raw)
        self.gossip.show(admission)

    def _on_manifest(self, envelope: Envelope) -> None:
        passed_on = self.passes_on
        self.node.take_version(self.run, envelope)
        self.node.manifests[self.run.id] = self.run.manifest_envelope
        self.store.keep = self._checkpoints_kept()
        self._vouch_for_trusted()
        self._obey_mode()
        if self.passes_on != passed_on:
            self.have.tells_changed()
        self.versions.touch()

    def _checkpoints_kept(self) -> int:
        """Rollouts of every policy young enough to be trained on must be checked somewhere."""
        return max(self.run.manifest.checkpoints_kept, self.run.max_staleness + 2)

    async def manifest_of(self, order: StepOrder) -> RunManifest:
        """The manifest that an order's step follows, had from a trusted peer if it is not here.

        Waits for as long as none has it: callers set a deadline, or stop when the order no longer
        counts.
        """
        complain_at = 0.0
        while (held := self.run.manifest_of(order)) is None:
            async with self._asking_for_version:
                if self.run.manifest_of(order) is not None or await self._ask_for_version(order):
                    continue
            if self.node.world.now() >= complain_at:
                complain_at = self.node.world.now() + VERSION_COMPLAINT_SECONDS
                self.node.events.emit(
                    "run.version_awaited", version=order.run_version, step=order.step
                )
            with trio.move_on_after(VERSION_SECONDS):
                await self.versions.wait_change()
        return held

    async def _ask_for_version(self, order: StepOrder) -> bool:
        """Ask the trusted peers for the version that an order names; whether one had it."""
        for trusted in self.run.manifest.trusted_ids():
            peer = PeerId(trusted)
            if peer == self.peer_id:
                continue
            try:
                await self.node.reach(peer)
                for envelope in await ask_for_manifests(
                    self.node.transport, peer, order.run_digest
                ):
                    if (
                        envelope.body.run == self.run.id
                        and content_digest(envelope) == order.run_digest
                    ):
                        self.hear_manifest(envelope)
                        self.run.keep(envelope)
                        self.versions.touch()
                        return True
            except PeerError as error:
                self.node.events.emit("gossip.version_not_told", remote=peer, reason=str(error))
        return False

    async def store_versions(self) -> None:
        """Make the versions that the run remembers durable."""
        versions = self.run.versions()
        if versions != self._stored:
            await self.node.store_versions(self.run.id, versions)
            self._stored = versions

    async def _keep_versions_stored(self) -> None:
        while True:
            await self.store_versions()
            if self._stored == self.run.versions():
                await self.versions.wait_change()

    async def _compare_with_bootstrap(self) -> None:
        """Take newer manifests from the bootstrap peers, and bring them newer ones, until
        cancelled."""
        named = [
            (PeerId(address.rpartition("/p2p/")[2]), address)
            for address in self.node.settings.bootstrap
        ]
        while True:
            await trio.sleep(BOOTSTRAP_SECONDS)
            for peer, address in named:
                if peer == self.peer_id:
                    continue
                try:
                    if peer not in self.node.transport.connected():
                        await self.node.transport.connect(peer, [address])
                    mine = self.run.manifest_envelope
                    for told in await ask_for_manifests(self.node.transport, peer, mine.raw):
                        if told.body.run == self.run.id:
                            self.hear_manifest(told)
                except PeerError as error:
                    self.node.events.emit("dht.bootstrap_silent", remote=peer, reason=str(error))

    def _on_eviction(self, envelope: Envelope) -> None:
        self.run.evict(envelope)
        assert isinstance(envelope.message, Eviction)
        evicted = PeerId(envelope.message.peer)
        self.node.events.emit(
            "membership.peer_evicted", remote=evicted, reason=envelope.message.reason
        )
        if evicted == self.peer_id:
            self._evicted.set(envelope.message)
        else:
            self._heard_eviction.send_nowait((evicted, self.node.world.now()))

    async def _cut_off_evicted(self) -> None:
        """Disconnect evicted peers, once they have had the time to hear why."""
        async for peer, heard in self._evictions:
            await trio.sleep_until(heard + EVICTION_NOTICE_SECONDS)
            if self.run.evicted(peer) is not None:
                self.node.transport.ban(peer, defaults.GOSSIP_BAN_SECONDS)

    async def _leave_when_evicted(self) -> None:
        eviction = await self._evicted.wait_until(lambda eviction: eviction is not None)
        assert eviction is not None
        raise NotAdmitted(f"evicted: {eviction.reason}")

    async def run_over(self) -> None:
        """Wait until a trainer says that the run is over."""
        await self.order.wait_until(lambda _: self._is_over())

    def _is_over(self) -> bool:
        order = self.step_order()
        return order is not None and order.final

    # --- checkpoints -------------------------------------------------------------------------

    def sources(self, manifest_digest: bytes) -> list[Source]:
        """Peers that may hold a checkpoint, in the order of their ids: neighbours, others
        connected, the DHT's providers, and of those heard of some at random, the same ones each
        time."""
        found: dict[PeerId, Source] = {
            peer: Source(peer, tuple(record.bulk_addresses))
            for peer, record in self._others().items()
        }
        provided = {source.peer: source for source in self._providers.get(manifest_digest, ())}
        for peer, source in provided.items():
            if peer is not None:
                found.setdefault(peer, source)
        peers = sorted(found)
        if len(peers) > SOURCES_MAX:
            connected = set(self.node.transport.connected())
            self._lot = self._lot or self.node.world.random.randbytes(16)
            drawn = sorted(
                peers, key=lambda peer: blake3(self._lot + manifest_digest + peer.encode()).digest()
            )
            near = sorted(
                drawn,
                key=lambda peer: (
                    not self.have.speaks(peer),
                    peer not in connected,
                    peer not in provided,
                ),
            )
            peers = sorted(list(dict.fromkeys(near[:SOURCES_NEAR_MAX] + drawn))[:SOURCES_MAX])
        return [found[peer] for peer in peers]

    async def _meet(self) -> PeerId | None:
        """Connect to one more peer of the run, drawn at random: there is uplink to spare."""
        connected = set(self.node.transport.connected())
        others = [peer for peer in self._others() if peer not in connected]
        if not others:
            return None
        peer = self.node.world.random.choice(others)
        try:
            await self.node.reach(peer)
        except PeerError:
            return None  # it was worth a try: another one is drawn next time
        return peer

    async def fetch_policy(
        self,
        lineage: int,
        step: int,
        manifest_digest: bytes,
        manifest_bytes: int,
        *,
        deadline_seconds: float = defaults.CHECKPOINT_DEADLINE_SECONDS,
    ) -> str:
        """The folder of one policy on this peer's disk, fetched if it is not there.

        Raises what `Fetcher.fetch` raises, and `BadManifest` for another tokenizer than the run's.
        """
        checkpoint = Checkpoint(
            lineage=lineage,
            step=step,
            manifest_digest=manifest_digest,
            manifest_bytes=manifest_bytes,
            total_bytes=0,
        )
        held = self.store.held((lineage, step))
        failed: Exception | None = None
        async with trio.open_nursery() as nursery:
            if held is None or not held.complete:
                # Beside the fetch: a lookup may have to wait for peers that are away.
                nursery.start_soon(self._find_providers, manifest_digest)
            try:
                folder = await self.fetcher.fetch(
                    checkpoint,
                    lambda: self.sources(manifest_digest),
                    deadline_seconds=deadline_seconds,
                )
            except Exception as error:  # raised again below, outside the nursery's group
                failed = error
            nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed
        await self._check_tokenizer(folder, step)
        return folder

    async def _check_tokenizer(self, folder: str, step: int) -> None:
        path = f"{folder}/tokenizer.json"
        disk = self.node.disk
        known = disk.exists(path)
        digest = await disk.digest(path, 0, disk.size_bytes(path)) if known else b""
        if digest != self.run.manifest.tokenizer_hash:
            raise BadManifest(
                f"policy {step} {'has another' if known else 'lacks the'} tokenizer than run "
                f"{self.run.id} was signed for"
            )

    async def _find_providers(self, manifest_digest: bytes) -> None:
        """Ask the DHT who holds a checkpoint, if no neighbour claims to before long."""
        if await self.have.wait_claimed(manifest_digest, CLAIM_SECONDS):
            return
        try:
            providers = await self.node.dht.find_providers(checkpoint_key(manifest_digest))
        except PeerError as error:
            self.node.events.emit("dht.no_providers", reason=str(error))
            return
        sources = []
        for provider in providers:
            record = self.node.record(provider.peer)
            try:
                if not self.run.passes_on(provider.peer, record.roles if record else ()):
                    record = record or await self.node.find_record(provider.peer)
                    if record is None or not self._is_dealt_with(provider.peer, record):
                        continue
                sources.append(Source(provider.peer))
                if record is None:
                    await self.node.reach(provider.peer)
            except PeerError as error:
                self.node.events.emit(
                    "dht.provider_unreachable", remote=provider.peer, reason=str(error)
                )
        self._providers = {manifest_digest: sources}

    async def follow_checkpoints(self, kept_in_memory: int = 0) -> None:
        """Fetch every checkpoint as it is announced (the newest first), until cancelled.

        Raises `UserError` before anything of the first is fetched if so many policies as this
        peer's role keeps at a time do not fit into the memory of this machine.
        """
        checked = False
        while True:
            checkpoint = self.newest_checkpoint()
            if checkpoint is None:
                await self.checkpoint.wait_change()
                continue
            if not checked:
                self._check_memory(checkpoint, kept_in_memory)
                checked = True
            try:
                await self.fetch_policy(
                    checkpoint.lineage,
                    checkpoint.step,
                    checkpoint.manifest_digest,
                    checkpoint.manifest_bytes,
                )
                self.status.policy = max(self.status.policy, checkpoint.step)
            except (PeerError, BadManifest, CheckpointConflict) as error:
                self.node.events.emit(
                    "shardcast.checkpoint_failed", step=checkpoint.step, reason=str(error)
                )
            if checkpoint == self.newest_checkpoint():
                await self.checkpoint.wait_change()

    def _check_memory(self, checkpoint: Checkpoint, policies: int) -> None:
        needed = policies * checkpoint.total_bytes
        if not needed:
            return
        free = self.node.compute.free_memory_bytes()
        if needed > free:
            raise UserError(
                f"policies of run {self.run.id} have {checkpoint.total_bytes / 1e6:,.1f} MB, and "
                f"{policies} must fit into memory at a time, but only {free / 1e6:,.1f} MB are "
                "free; stop other programs, or use a machine with more memory"
            )

    async def _provide_newest(self) -> None:
        provided: bytes | None = None
        while True:
            complete = self.store.complete()
            held = self.store.held(max(complete)) if complete and self.passes_on else None
            if held is not None and held.digest != provided:
                if provided is not None:
                    self.node.dht.stop_providing(checkpoint_key(provided))
                if self._is_named():
                    await self.node.dht.provide(checkpoint_key(held.digest))
                provided = held.digest
            await trio.sleep(PROVIDE_SECONDS if provided else 1.0)

    def _is_named(self) -> bool:
        """Whether the DHT is to name this peer as a source of a checkpoint: in a large run not
        everybody, since the twenty holders of that record would hear from all of them at once."""
        if self._trusted is not None or "relay" in self.node.settings.role:
            return True
        return self.node.world.random.random() * len(self._others()) < PROVIDERS_WANTED

    # --- background --------------------------------------------------------------------------

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[trio.Nursery]:
        """Take part in the run inside this block; the nursery owns every background task.

        Raises `UserError` when the run refuses this peer.
        """
        if self._trusted is not None:
            await self._trusted.open()
        await self.store.recover()
        self.node.transport.serve_bulk(self.blobs)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.messenger.run)
                await nursery.start(self.have.run)
                await nursery.start(self.gossip.run)
                self._clock.check_own(self.node.sequencer.signed_until)
                self._publish_manifest()
                nursery.start_soon(self._leave_when_evicted)
                nursery.start_soon(self._cut_off_evicted)
                nursery.start_soon(self._be_reachable)
                nursery.start_soon(self._provide_newest)
                nursery.start_soon(self.store.keep_settling)
                nursery.start_soon(self._report_status)
                nursery.start_soon(self._find_neighbours)
                nursery.start_soon(self._keep_versions_stored)
                if self._trusted is not None:
                    nursery.start_soon(self._trusted.run)
                    nursery.start_soon(self._compare_with_bootstrap)
                if self.lease is not None:
                    await nursery.start(self.lease.keep)
                yield nursery
                nursery.cancel_scope.cancel()
        except* NotAdmitted as group:
            reason = str(leaf_errors(group)[0])
            raise UserError(f"run {self.run.id} does not admit this peer: {reason}") from None
        finally:
            if self._trusted is not None:
                self._trusted.close()

    def _publish_manifest(self) -> None:
        """Gossip the manifest; raises `UserError` where this peer's clock forbids it."""
        try:
            self.gossip.publish(self.run.manifest_envelope)
        except Dropped as dropped:
            body, wall = self.run.manifest_envelope.body, self.node.world.wall_time()
            when = f"while this machine's clock says {_moment(wall)}"
            if dropped.cause == "expired":
                raise UserError(
                    f"the manifest of run {self.run.id} expired on "
                    f"{_moment(body.expires_ms / 1000)}, {when}; "
                    "its owner must sign a newer version, unless the clock is wrong"
                ) from None
            if dropped.cause == "from_the_future":
                raise UserError(
                    f"the manifest of run {self.run.id} was signed on "
                    f"{_moment(body.issued_ms / 1000)}, {when}; set the clock and start again"
                ) from None
            raise

    async def _be_reachable(self) -> None:
        """Behind NAT, have relays carry connections here; hole punching makes them direct."""
        await trio.sleep(RELAY_AFTER_SECONDS)
        transport = self.node.transport
        if transport.reachability() is Reachability.PUBLIC or "relay" in self.node.settings.role:
            return
        if not self.passes_on:
            return  # nobody is to come
        used = 0
        for envelope in self.node.records():
            record = envelope.message
            assert isinstance(record, PeerRecord)
            if "relay" not in record.roles or used >= RELAYS_USED or not record.addresses:
                continue
            try:
                await transport.use_relay(record.addresses[0])
                used += 1
                self.node.events.emit("transport.relay_used", relay=envelope.sender)
            except PeerError as error:
                self.node.events.emit(
                    "transport.relay_refused", relay=envelope.sender, reason=str(error)
                )

    async def _report_status(self) -> None:
        while True:
            heartbeat = self.describe()
            self.node.events.emit(
                "peer.status",
                doing=heartbeat.doing,
                policy=heartbeat.policy,
                step=heartbeat.step,
                tokens_per_second=heartbeat.tokens_per_second,
                bytes_sent=heartbeat.bytes_sent,
                bytes_received=heartbeat.bytes_received,
            )
            with trio.move_on_after(self.node.settings.status_seconds):
                await self.status.changed.wait_change()

    async def _find_neighbours(self) -> None:
        """Keep enough gossip neighbours that take part, trusted ones among them: of these a trusted
        peer wants as many, and every other at least one, whoever else crowds in."""
        while True:
            members = self.gossip.members()
            near = sum(self.run.trusts(peer) for peer in members)
            wanted = max(0, defaults.GOSSIP_NEIGHBOURS_WANTED - len(members))
            lacking = max(wanted, (1 if self.lease else defaults.GOSSIP_NEIGHBOURS_WANTED) - near)
            if lacking > 0:
                connected = self.node.transport.connected()
                known = [peer for peer in self._others() if peer not in connected]
                trusted = [
                    PeerId(peer)
                    for peer in self.run.manifest.trusted_ids()
                    if peer not in connected and peer != self.peer_id
                ]
                others = self.node.world.random.sample(known, min(wanted, len(known)))
                for peer in list(dict.fromkeys(trusted[:lacking] + others)):
                    try:
                        await self.node.reach(peer)
                    except (PeerError, Dropped) as error:
                        self.node.events.emit(
                            "gossip.neighbour_unreachable", remote=peer, reason=str(error)
                        )
            await trio.sleep(NEIGHBOUR_SEARCH_SECONDS if wanted > 0 else NEIGHBOUR_CHECK_SECONDS)


__all__ = [
    "Node",
    "RunNode",
    "Status",
    "StoredSequence",
    "assemble",
    "find_run",
    "join_dht",
    "join_network",
]
