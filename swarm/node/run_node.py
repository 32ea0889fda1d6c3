"""A node inside one run: everything that its roles use (`swarm.roles`)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import trio
from blake3 import blake3

from swarm import defaults
from swarm.envelope import Dropped, Envelope, Gate
from swarm.errors import PeerError, UserError, leaf_errors
from swarm.gossip import RUN, Gossip
from swarm.identity import PeerId
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
from swarm.node.node import Node
from swarm.node.pushes import Pushes
from swarm.node.status import Status
from swarm.observable import Observable
from swarm.run.admission import NotAdmitted, admits
from swarm.run.clock import TrustedClock
from swarm.run.exchange import BOOTSTRAP_SECONDS, ask_for_manifests
from swarm.run.lease import Lease
from swarm.run.manifest import content_digest
from swarm.run.records import checkpoint_key
from swarm.run.run import VERSION_REFUSED, Run
from swarm.run.trusted import TrustedPart, not_named
from swarm.shardcast.chain import Deltas
from swarm.shardcast.fetch import Fetcher
from swarm.shardcast.have import HaveExchange
from swarm.shardcast.manifest import BadManifest
from swarm.shardcast.service import BlobService
from swarm.shardcast.store import CheckpointConflict, CheckpointStore
from swarm.shardcast.uploads import Uploads
from swarm.transport import (
    Reachability,
    Source,
)

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


class RunNode:
    """A node inside one run: gate, gossip, messenger, membership, checkpoints."""

    def __init__(self, node: Node, run: Run, topics: Sequence[str] = (RUN,)) -> None:
        self.node = node
        node.part = self
        self.run: Run = run
        self.status = Status()
        self.gate: Gate = Gate(node.world, run.id, self._permits, run.trusts, run.clock_off)
        self._clock = TrustedClock(run, node.world, node.events, node.peer_id)
        self.gossip: Gossip = Gossip(
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
        self.messenger: Messenger = Messenger(node.transport, self.gate, node.events)
        self.checkpoint: Observable[Envelope | None] = Observable(None)
        """Newest checkpoint announced by a trainer of the run."""
        self.order: Observable[Envelope | None] = Observable(None)
        """Newest step order."""
        self.versions = Observable(0)
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
        self.pushes = Pushes()
        self.blobs = BlobService(
            self.admits, store=self.store, uploads=self.uploads, pushes=self.pushes
        )
        self._providers: dict[bytes, list[Source]] = {}
        self._lot = b""
        """Secret, drawn when first needed: decides which of many peers are sources."""
        self._evicted: Observable[Eviction | None] = Observable(None)
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
    def _newest(watched: Observable[Envelope | None], envelope: Envelope) -> None:
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
