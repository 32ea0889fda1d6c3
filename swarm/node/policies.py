"""Policies of a run on this peer: fetched from other peers and provided to them.

`Announced` holds what the trainers of a run have announced, as this peer has heard it. Gossip
repeats the newest announcement only. In a run whose workers swap weights in flight
(`Sampling.swaps_max`), a submission names older ones, too: a worker presents their announcements to
its validator, and both keep them over a restart. A trainer and its standbys keep them, to
find policies again that were deleted from their disks."""

from collections.abc import Sequence
from typing import NamedTuple

import trio
from blake3 import blake3

from swarm.errors import PeerError, UserError
from swarm.node.neighbours import Neighbours
from swarm.node.node import Node
from swarm.node.status import Status
from swarm.run.records import checkpoint_key
from swarm.run.run import Run
from swarm.shardcast import limits
from swarm.shardcast.chain import Deltas
from swarm.shardcast.fetch.fetcher import Fetcher
from swarm.shardcast.have.streams import HaveExchange
from swarm.shardcast.manifest import BadManifest
from swarm.shardcast.store import CheckpointConflict, CheckpointStore
from swarm.shardcast.uploads import Uploads
from swarm.transport import Source
from swarm.wire.envelope import Envelope, readable
from swarm.wire.identity import PeerId
from swarm.wire.messages import Checkpoint, CheckpointReference
from swarm.world import execute
from swarm.world.observable import Observable
from swarm.world.tasks import open_guarded

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

    def newest(self) -> CheckpointReference | None:
        """The newest policy of any lineage."""
        return self._known[max(self._known)].expect(Checkpoint).reference if self._known else None

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
        rows = self._node.database.read(
            "SELECT envelope FROM announced WHERE run = ? ORDER BY lineage, step", (self._run.id,)
        )
        for envelope in readable(raw for (raw,) in rows):  # another version of Swarm wrote others
            self._remember(envelope)

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
        insert = "INSERT OR REPLACE INTO announced VALUES (?, ?, ?, ?)"
        delete = "DELETE FROM announced WHERE run = ? AND (lineage, step) < (?, ?)"
        await execute(
            self._node.database,
            *((insert, row) for row in rows),
            (delete, (self._run.id, *min(self._known))),
        )

    @property
    def _is_kept(self) -> bool:
        """Without swaps, a submission names the policy of its step order only.

        A later version of the manifest may allow them."""
        manifest = self._run.manifest
        return manifest.sampling.swaps_max > 0 or manifest.may_train(self._node.peer_id)


SOURCES_MAX = 64
"""Number of peers considered as sources of one checkpoint."""

SOURCES_NEAR_MAX = 48
"""Number of sources chosen by preference: neighbours first. The rest are drawn at random, so that
many connected liars are never the only sources."""

CLAIM_SECONDS = 1.0
"""Time for neighbours to announce that they have a checkpoint, before the DHT is asked for
providers. A new checkpoint spreads between neighbours about as fast as a lookup runs."""

PROVIDE_SECONDS = 30.0
"""Interval between checks whether to publish a provider record of a newer checkpoint. It is long
because only newcomers use the DHT: neighbours learn of pieces at once, by HAVE."""

PROVIDERS_WANTED = 64
"""Approximate number of inference peers that the DHT names as sources of a checkpoint."""


class _Prefetch(NamedTuple):
    """The fetch of the newest policy before a role needs it."""

    reference: CheckpointReference
    scope: trio.CancelScope


class Policies:
    """Decides which policy of a run to fetch, and provides the newest complete one to others.

    A policy that a role needs (`get`) comes before the newest announced one (`follow`), so that a
    newcomer can work as soon as its link allows."""

    def __init__(
        self,
        node: Node,
        run: Run,
        *,
        neighbours: Neighbours,
        store: CheckpointStore,
        uploads: Uploads,
        checkpoint: Observable[Envelope | None],
        status: Status,
    ) -> None:
        """`checkpoint` holds a trainer's newest announcement. This class updates `status`."""
        self._node = node
        self._run = run
        self._neighbours = neighbours
        self._store = store
        self._checkpoint = checkpoint
        self._status = status
        self.have = HaveExchange(
            node.world,
            node.transport,
            store,
            node.events,
            uploads=uploads,
            meet=neighbours.meet,
            tells=self._serves,
        )
        self.deltas = Deltas(store, node.compute, node.events)
        self.fetcher = Fetcher(
            node.world, node.transport, store, node.events, have=self.have, deltas=self.deltas
        )
        self._needed: Observable[list[CheckpointReference]] = Observable([])
        """Policies that roles wait for and that are not yet complete on this peer's disk."""
        self._prefetch: _Prefetch | None = None
        self._providers: dict[bytes, list[Source]] = {}
        self._lot = b""
        """Random secret, drawn on first use, that decides which of many peers are sources."""

    def _serves(self) -> bool:
        return self._run.serves(self._node.peer_id, self._node.settings.role)

    def newest(self) -> Checkpoint | None:
        envelope = self._checkpoint.value
        return envelope.expect(Checkpoint) if envelope is not None else None

    def sources(self, manifest_digest: bytes) -> list[Source]:
        """Return up to `SOURCES_MAX` peers that may hold a checkpoint, in the order of their ids.

        It prefers neighbours that announce pieces, then other connected peers, then the DHT's
        providers. The rest are drawn from the known peers at random, the same ones each time."""
        found: dict[PeerId, Source] = {
            peer: Source(peer, tuple(record.bulk_addresses))
            for peer, record in self._neighbours.others().items()
        }
        provided = {source.peer: source for source in self._providers.get(manifest_digest, ())}
        for peer, source in provided.items():
            if peer is not None:
                found.setdefault(peer, source)
        peers = sorted(found)
        if len(peers) > SOURCES_MAX:
            connected = set(self._node.transport.connected())
            self._lot = self._lot or self._node.world.random.randbytes(16)
            drawn = sorted(
                peers, key=lambda peer: blake3(self._lot + manifest_digest + peer.encode()).digest()
            )
            near = sorted(
                drawn,
                key=lambda peer: (
                    not self.have.claims.announces(peer),
                    peer not in connected,
                    peer not in provided,
                ),
            )
            peers = sorted(list(dict.fromkeys(near[:SOURCES_NEAR_MAX] + drawn))[:SOURCES_MAX])
        return [found[peer] for peer in peers]

    def claiming(self, digest: bytes, said: Sequence[str]) -> list[Source]:
        """Who announces a checkpoint to this peer, and `said`, who say elsewhere to have it."""
        names = dict.fromkeys([*self.have.claims.claiming(digest), *map(PeerId, said)])
        known = ((peer, self._neighbours.record(peer)) for peer in names)
        return [Source(peer, tuple(record.bulk_addresses)) for peer, record in known if record]

    # --- fetching ----------------------------------------------------------------------------

    async def get(
        self,
        reference: CheckpointReference,
        *,
        deadline_seconds: float = limits.CHECKPOINT_DEADLINE_SECONDS,
    ) -> str:
        """Return the folder of a policy on this peer's disk; fetch it before any other if missing.

        The base of an adapter is fetched with it, once. Raises the errors of `Fetcher.fetch`, and
        `BadManifest` if the policy's tokenizer is not the run's."""
        if self._is_here(reference):
            return await self._fetch(reference, deadline_seconds)
        self._needed.set([*self._needed.value, reference])
        if self._prefetch is not None and self._prefetch.reference != reference:
            self._prefetch.scope.cancel()
        try:
            return await self._fetch(reference, deadline_seconds)
        finally:
            needed = list(self._needed.value)
            needed.remove(reference)
            self._needed.set(needed)

    def progress(self, reference: CheckpointReference) -> str:
        """Say in one clause how many pieces of a policy are on this peer's disk."""
        held = self._store.held((reference.lineage, reference.step))
        if held is None:
            return "no piece has arrived"
        return f"{sum(held.pieces)} of {len(held.pieces)} pieces have arrived"

    def _is_here(self, reference: CheckpointReference) -> bool:
        held = self._store.held((reference.lineage, reference.step))
        if held is None or not held.complete:
            return False
        return held.manifest.base is None or self._is_here(held.manifest.base)

    async def _fetch(self, reference: CheckpointReference, deadline_seconds: float) -> str:
        folder = await self._fetch_one(reference, deadline_seconds)
        held = self._store.held((reference.lineage, reference.step))
        if held is not None and held.manifest.base is not None:
            await self._fetch_one(held.manifest.base, deadline_seconds)
        await self._check_tokenizer(folder, reference.step)
        return folder

    async def _fetch_one(self, reference: CheckpointReference, deadline_seconds: float) -> str:
        checkpoint = Checkpoint(reference=reference, total_bytes=0)
        async with open_guarded() as guarded:
            if not self._is_here(reference):
                # Concurrently with the fetch, because a lookup may wait for absent peers.
                guarded.nursery.start_soon(self._find_providers, reference.digest)
            folder = await self.fetcher.fetch(
                checkpoint,
                lambda: self.sources(reference.digest),
                deadline_seconds=deadline_seconds,
            )
            guarded.nursery.cancel_scope.cancel()
        return folder

    async def _check_tokenizer(self, folder: str, step: int) -> None:
        path = f"{folder}/tokenizer.json"
        disk = self._node.disk
        known = disk.exists(path)
        digest = await disk.digest(path, 0, disk.size_bytes(path)) if known else b""
        if digest != self._run.manifest.tokenizer_hash:
            raise BadManifest(
                f"policy {step} {'has another' if known else 'lacks the'} tokenizer than run "
                f"{self._run.id} was signed for"
            )

    async def _find_providers(self, manifest_digest: bytes) -> None:
        """Ask the DHT for providers unless a neighbour claims it in `CLAIM_SECONDS`."""
        if await self.have.claims.wait_claimed(manifest_digest, CLAIM_SECONDS):
            return
        try:
            providers = await self._node.dht.find_providers(checkpoint_key(manifest_digest))
        except PeerError as error:
            self._node.events.emit("dht.no_providers", reason=str(error))
            return
        sources = []
        for provider in providers:
            record = self._node.record(provider.peer)
            try:
                if not self._run.serves(provider.peer, record.roles if record else ()):
                    record = record or await self._node.find_record(provider.peer)
                    if record is None or not self._neighbours.deals_with(provider.peer, record):
                        continue
                sources.append(Source(provider.peer))
                if record is None:
                    await self._node.reach(provider.peer)
            except PeerError as error:
                self._node.events.emit(
                    "dht.provider_unreachable", remote=provider.peer, reason=str(error)
                )
        self._providers = {manifest_digest: sources}

    async def follow(self, kept_in_memory: int = 0) -> None:
        """Fetch the newest announced checkpoint, again and again, until cancelled.

        Pauses while a role needs another policy.

        `kept_in_memory` is the number of policies that this peer's role holds in memory at a time.
        Raises `UserError` before the first fetch if they do not fit into this machine's memory."""
        checked = False
        while True:
            checkpoint = self.newest()
            if checkpoint is None:
                await self._checkpoint.wait_change()
                continue
            if not checked:
                self._check_memory(checkpoint, kept_in_memory)
                checked = True
            if any(needed != checkpoint.reference for needed in self._needed.value):
                await self._needed.wait_change()
                continue
            if await self._follow_to(checkpoint) and checkpoint == self.newest():
                await self._checkpoint.wait_change()

    async def _follow_to(self, checkpoint: Checkpoint) -> bool:
        """Fetch one announced checkpoint; returns False if a role needed another one meanwhile."""
        with trio.CancelScope() as scope:
            self._prefetch = _Prefetch(checkpoint.reference, scope)
            try:
                await self._fetch(checkpoint.reference, limits.CHECKPOINT_DEADLINE_SECONDS)
                self._status.policy = max(self._status.policy, checkpoint.step)
            except (PeerError, BadManifest, CheckpointConflict) as error:
                self._node.events.emit(
                    "shardcast.checkpoint_failed", step=checkpoint.step, reason=str(error)
                )
            finally:
                self._prefetch = None
        return not scope.cancelled_caught

    def _check_memory(self, checkpoint: Checkpoint, policies: int) -> None:
        if not policies:
            return
        needed = checkpoint.base_bytes + policies * checkpoint.total_bytes
        free = self._node.compute.free_memory_bytes()
        if needed > free:
            size = f"{checkpoint.total_bytes / 1e6:,.1f}"
            if checkpoint.base_bytes:
                size += f" MB and a base of {checkpoint.base_bytes / 1e6:,.1f}"
            raise UserError(
                f"policies of run {self._run.id} have {size} MB, and {policies} must fit into "
                f"memory at a time, but only {free / 1e6:,.1f} MB are free; stop other programs, "
                "or use a machine with more memory"
            )

    async def provide_newest(self) -> None:
        provided: list[bytes] = []
        while True:
            complete = self._store.complete()
            held = self._store.held(max(complete)) if complete and self._serves() else None
            if held is not None and provided[:1] != [held.digest]:
                base = held.manifest.base
                wanted = [held.digest, *([base.digest] if base is not None else [])]
                for digest in provided:
                    if digest not in wanted:
                        self._node.dht.stop_providing(checkpoint_key(digest))
                if self._is_named():
                    for digest in wanted:
                        await self._node.dht.provide(checkpoint_key(digest))
                provided = wanted
            await trio.sleep(PROVIDE_SECONDS if provided else 1.0)

    def _is_named(self) -> bool:
        """Whether the DHT should name this peer as a source of a checkpoint.

        Trusted peers and relays always; in a large run only some of the others, since all of them
        would send their provider records to the same twenty peers at once."""
        if (
            self._node.peer_id in self._run.manifest.trusted_ids()
            or "relay" in self._node.settings.role
        ):
            return True
        return self._node.world.random.random() * len(self._neighbours.others()) < PROVIDERS_WANTED
