"""A peer in the network: its identity and signatures, and the peers and runs that it knows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from swarm.data import statements
from swarm.errors import PeerError
from swarm.events import Events
from swarm.kademlia.dht import Kademlia
from swarm.node.searches import SEARCH_SECONDS_MAX, SEARCHES_MAX, Search
from swarm.run.changes import changes
from swarm.run.lease import HEARTBEAT_SECONDS
from swarm.run.manifest import content_digest, manifest_in
from swarm.run.manifest_exchange import serve_manifests
from swarm.run.records import peer_key
from swarm.run.run import VERSION_REFUSED, Run
from swarm.settings import PeerSettings
from swarm.transport import BlobReference, FetchError, Source, Transport
from swarm.version import __version__
from swarm.wire.envelope import Dropped, Envelope, Sequencer, open_envelope, readable, seal
from swarm.wire.identity import Identity, PeerId
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Message, PeerRecord
from swarm.world import Compute, Database, Disk, World, execute
from swarm.world.recent import Recent


class Departure:
    """A request to leave: roles with a method `leave` finish first; then the peer says goodbye."""

    def __init__(self) -> None:
        self.asked = trio.Event()
        self.listens = False
        """Whether roles are at work, which end by themselves when they are asked to."""

    def ask(self) -> bool:
        """Ask the roles to leave; returns whether they do. False if called again: the work is then
        abandoned."""
        if not self.listens or self.asked.is_set():
            return False
        self.asked.set()
        return True


PEER_RECORD_LIFETIME_SECONDS = 3600.0
"""Lifetime of a peer record; it is republished after half of this time."""

PEERS_MET = "peers-met"
"""File in the home with addresses of peers that this one is connected to. A restarted peer joins
through them while its bootstrap peers are down."""

PEERS_MET_MAX = 16

RECORDS_MAX = 1024
"""Number of peer records remembered (about 0.5 KB each)."""

RECORDS_BYTES_MAX = 2 << 20
"""Bytes of all peer records remembered; beyond them the longest of an unconnected peer is dropped.
Strangers choose a record's length, and in memory it takes three times as much."""

RECORD_BYTES_MAX = 11 * 1024
"""Largest peer record remembered. It has room for 16 + 16 addresses of 300 characters, and 16 such
records fit the frame in which they are forwarded."""


async def create_tables(database: Database) -> None:
    await execute(database, Sequencer.TABLE, *statements(__file__))


@dataclass
class Node:
    """A peer in the network, whether or not it has joined a run."""

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
    """Signed run manifests that this peer hands out, by run id."""
    departure: Departure = field(default_factory=Departure)
    _followed: tuple[Run, Callable[[Envelope], None]] | None = None
    _records: dict[str, Envelope] = field(default_factory=dict)
    """The newest record of each known peer, the most recently learnt last."""
    _records_bytes: int = 0
    _refused: dict[str, RunManifest] = field(default_factory=dict)
    _searches: Recent[PeerId, Search] = field(default_factory=lambda: Recent(SEARCHES_MAX))
    _met: dict[PeerId, list[str]] = field(default_factory=dict)
    """Peers and addresses in the file `PEERS_MET`."""

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def addresses(self) -> list[str]:
        """The multiaddrs at which others reach this peer."""
        return list(self.transport.addresses())

    @property
    def bootstrap(self) -> list[str]:
        return list(dict.fromkeys(self.settings.bootstrap))

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
        """Hand out the known manifests to any peer that asks, and accept newer ones."""
        serve_manifests(
            self.transport,
            newest=lambda: list(self.manifests.values()),
            version=self.version,
            hear=self.hear_manifest,
        )

    def follow(self, run: Run, hear: Callable[[Envelope], None]) -> None:
        """Hand out the versions of the run that this peer is in, and give `hear` its newer ones."""
        self._followed = (run, hear)

    def version(self, digest: bytes) -> Envelope | None:
        """Find the known version of a run's manifest with this content digest."""
        if self._followed is not None and (held := self._followed[0].version(digest)) is not None:
            return held
        return next((e for e in self.manifests.values() if content_digest(e) == digest), None)

    def hear_manifest(self, envelope: Envelope) -> Envelope | None:
        """Accept a newer manifest of a known run; returns the run's newest manifest, if known."""
        run = envelope.body.run
        if self._followed is not None and self._followed[0].id == run:
            self._followed[1](envelope)
        elif run in self.manifests:
            known = Run(self.manifests[run])
            self.take_version(known, envelope)
            self.manifests[run] = known.manifest_envelope
        return self.manifests.get(run)

    def take_version(self, run: Run, envelope: Envelope) -> None:
        """Accept a newer manifest of a run and report its changes, or report why it is refused."""
        held, new = run.manifest, manifest_in(envelope)
        self.say_refused(run, envelope.sender, new)
        if run.update(envelope):
            listed = [str(change) for change in changes(held, new)]
            self.events.emit("run.version_signed", version=new.version, changes=listed)

    def permits(self, run: Run, sender: str, message: Message) -> str | None:
        """As `Run.permits`; reports a manifest that the run refuses."""
        cause = run.permits(sender, message)
        if cause == VERSION_REFUSED:
            assert isinstance(message, RunManifest)
            self.say_refused(run, sender, message)
        return cause

    def say_refused(self, run: Run, sender: str, manifest: RunManifest) -> None:
        """Report why a manifest is refused, if it is. Repeated copies are reported only once."""
        reason = run.refusal(sender, manifest)
        if reason is not None and self._refused.get(run.id) != manifest:
            self._refused[run.id] = manifest
            self.events.emit("run.version_refused", version=manifest.version, reason=reason)

    def stored_versions(self, run: str) -> list[Envelope]:
        """Read the versions of a run that this peer stored before its restart, newest last.

        Leaves out those that another version of Swarm stored and this one cannot read."""
        rows = self.database.read(
            "SELECT envelope FROM manifests WHERE run = ? ORDER BY version, digest", (run,)
        )
        return list(readable(raw for (raw,) in rows))

    async def store_versions(self, run: str, versions: Sequence[Envelope]) -> None:
        """Store versions of a run durably, replacing those stored before."""
        rows = [
            (run, manifest_in(each).version, content_digest(each), each.raw) for each in versions
        ]
        delete = "DELETE FROM manifests WHERE run = ?"
        insert = "INSERT INTO manifests (run, version, digest, envelope) VALUES (?, ?, ?, ?)"
        await execute(self.database, (delete, (run,)), *((insert, row) for row in rows))

    # --- addresses of peers ------------------------------------------------------------------

    def learn_record(self, envelope: Envelope) -> None:
        """Remember the newest record of a peer. The caller has checked the signature."""
        if len(envelope.raw) > RECORD_BYTES_MAX:
            return  # padded
        held = self._records.get(envelope.sender)
        if held is not None and held.body.sequence >= envelope.body.sequence:
            return
        self._forget_record(envelope.sender)
        self._records[envelope.sender] = envelope
        self._records_bytes += len(envelope.raw)
        while (crowded := len(self._records) > RECORDS_MAX) or (
            self._records_bytes > RECORDS_BYTES_MAX
        ):
            # Identities are free, so however many are announced, connected peers stay.
            connected = {self.peer_id, *self.transport.connected()}
            others = (peer for peer in self._records if peer not in connected)
            if crowded:  # usual in a large run, so it ends at the first
                self._forget_record(next(others, next(iter(self._records))))
                continue
            # A flood of long records displaces only long ones.
            longest = max(
                list(others) or self._records, key=lambda peer: len(self._records[peer].raw)
            )
            self._forget_record(longest)

    def _forget_record(self, peer: str) -> None:
        held = self._records.pop(peer, None)
        if held is not None:
            self._records_bytes -= len(held.raw)

    def record(self, peer: str) -> PeerRecord | None:
        """Return the newest known record of a peer."""
        envelope = self._records.get(peer)
        return envelope.expect(PeerRecord) if envelope is not None else None

    def records(self) -> list[Envelope]:
        """Return all known records including this peer's own, the most recently learnt last."""
        return list(self._records.values())

    async def find_record(self, peer: PeerId) -> PeerRecord | None:
        """Look up a peer's record in the DHT and remember it."""
        raw = await self.dht.get(peer_key(peer))
        if raw is None:
            return None
        envelope = open_envelope(raw)
        self.learn_record(envelope)
        return envelope.expect(PeerRecord)

    async def reach(self, peer: PeerId) -> None:
        """Connect to a peer unless connected: by its known addresses, else by those in the DHT,
        which is not searched again for a while after a search in vain.

        Raises a `PeerError` that names the peer."""
        if peer not in self.transport.connected():
            search, began = self._searches.of(peer, Search), self.world.now()
            async with search.lock:
                if peer not in self.transport.connected():
                    await self._look_in_turn(peer, search, began)
        ended = self._searches.pop(peer, None)
        if ended is not None and ended.forgotten is not None:
            self.learn_record(ended.forgotten)  # who asks this peer for pieces reads it

    async def fetch_file(self, peer: PeerId, wanted: BlobReference, path: str) -> None:
        """Fetch a file by its hash from one peer, and put it at `path`. Not yet durable.

        Raises a `PeerError` that names the peer."""
        await self.reach(peer)
        record = self.record(peer)
        source = Source(peer, tuple(record.bulk_addresses) if record else ())
        sink = self.disk.sink(path, 0, wanted.size_bytes)
        piece = await self.transport.fetch(source, wanted, sink)
        if not piece.verify(wanted.digest):
            sink.abandon()
            raise FetchError(f"{peer} sent another file than {wanted.digest.hex()}")
        await sink.commit(piece)

    async def _look_in_turn(self, peer: PeerId, search: Search, began: float) -> None:
        """Look for a peer, unless another caller has failed since `began`, and nothing new is known
        of the peer: that failure is this caller's, too."""
        record = self.record(peer)
        is_news = record is not None and record.addresses != search.addresses
        if search.failed_at > began and not is_news:
            raise PeerError(search.failure)
        try:
            await self._look_for(peer, search)
        except PeerError as error:
            search.fail(str(error), self.world.now())
            raise

    async def _look_for(self, peer: PeerId, search: Search) -> None:
        record = self.record(peer)
        known = record.addresses if record is not None else search.addresses
        if known or record is not None:
            try:
                await self.transport.connect(peer, known)
                return
            except PeerError:
                if peer in self.transport.connected():
                    return  # it has connected to this one meanwhile
                search.addresses = known
                search.forgotten = self._records.get(peer, search.forgotten)
                self._forget_record(peer)
                if self.world.now() < search.again_at:
                    raise
        if self.world.now() < search.again_at:
            raise PeerError(f"no address of {peer} was known to the DHT a moment ago")
        try:
            with trio.fail_after(SEARCH_SECONDS_MAX):
                record = await self.find_record(peer)
                addresses: Sequence[str] = record.addresses if record is not None else ()
                if not addresses:
                    addresses = await self.dht.find_peer(peer)
                if not addresses:
                    raise PeerError(f"no address of {peer} is known to the DHT")
                search.addresses = addresses
                await self.transport.connect(peer, addresses)
        except (PeerError, Dropped):
            search.vain(self.world.now())
            raise
        except trio.TooSlowError as error:
            search.vain(self.world.now())
            raise PeerError(
                f"{peer} was not found by the DHT within {SEARCH_SECONDS_MAX:g} s"
            ) from error

    async def _remember_peers(self, trusted: Sequence[str]) -> None:
        """Write the addresses of up to `PEERS_MET_MAX` connected peers to disk, trusted ones first.

        Does nothing while those on disk are still connected."""
        connected = {
            peer: addresses
            for peer in self.transport.connected()
            if (addresses := self._addresses_of(peer))
        }
        if self._met.items() <= connected.items() and (
            len(self._met) in (PEERS_MET_MAX, len(connected))
        ):
            return
        chosen = sorted(connected, key=lambda peer: (peer not in trusted, peer))[:PEERS_MET_MAX]
        self._met = {peer: connected[peer] for peer in chosen}
        lines = [address for addresses in self._met.values() for address in addresses]
        await self.disk.write(PEERS_MET, "\n".join(lines).encode())

    def _addresses_of(self, peer: PeerId) -> list[str]:
        record, contact = self.record(peer), self.dht.table.get(peer)
        if record is not None:
            return record.addresses
        return list(contact.addresses) if contact is not None else []

    async def publish_record(self, run: Run | None = None) -> None:
        """Keep this peer's record in the DHT until cancelled; none if it serves nobody in `run`."""
        published: tuple[list[str], list[str]] | None = None
        until = 0.0
        while True:
            addresses = (list(self.transport.addresses()), list(self.transport.bulk_addresses()))
            if run is not None and not run.serves(self.peer_id, self.settings.role):
                self.dht.withdraw(peer_key(self.peer_id))
                published = None
            elif addresses != published or self.world.now() >= until:
                record = PeerRecord(
                    roles=self.settings.role,
                    addresses=addresses[0][:16],
                    bulk_addresses=addresses[1][:16],
                    agent=f"swarm/{__version__}",
                )
                envelope = await self.seal(record, PEER_RECORD_LIFETIME_SECONDS)
                self.learn_record(envelope)
                await self.dht.put(peer_key(self.peer_id), envelope.raw)
                published = addresses
                until = self.world.now() + PEER_RECORD_LIFETIME_SECONDS / 2
            await self._remember_peers(run.manifest.trusted_ids() if run is not None else ())
            await trio.sleep(HEARTBEAT_SECONDS)
