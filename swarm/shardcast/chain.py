"""Deltas on the network side: when one is published, and when one is used (decision 16).

The trainer publishes checkpoint k with a delta against k−1 where that saves bytes. A peer that
holds the base of one of the deltas in the manifest of k fetches those instead of the pieces, which
a child process makes from them. Each piece is checked as if it came over the network, and finally
the SHA-256 of each file. Pieces that a delta cannot give are fetched in full."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import trio

from swarm.errors import DeadlineError, SwarmError, leaf_errors
from swarm.events import Events
from swarm.shardcast import limits
from swarm.shardcast.held import Change, Held, Key, delta_key
from swarm.shardcast.jobs import DeltaService, EncodeDelta, MakePieces, PieceToMake
from swarm.shardcast.manifest import BadManifest, CheckpointManifest, DeltaLink, build
from swarm.shardcast.store import ENCODING_NAME, ROOT, CheckpointStore
from swarm.wire.messages import Checkpoint, CheckpointReference
from swarm.world import Compute, client

DELTA_CHECKPOINT_BYTES_MIN = 4 * 1024 * 1024
"""A smaller checkpoint is published without a delta: its full pieces travel as fast."""

DELTA_SHARE_MAX = 0.5
"""Largest delta to publish, and largest chain to fetch, as a share of the full bytes."""

DELTA_STALL_SECONDS = 60.0
"""A delta of which nothing arrives for this long is given up; the checkpoint is fetched in full."""

DELTA_TIME_SHARE = 0.25
"""Share of a fetch's remaining time in which a chain of deltas must arrive; else it is given up,
and the full pieces get the rest of the time."""

DELTA_BYTES_PER_CALL = 256 * 1024 * 1024
"""Bytes of pieces that a child makes from deltas in one call; they are served after each call."""

DELTA_CHILD_BYTES_MAX = 1 << 30
"""Address space of the child that encodes and applies deltas: python, numpy, buffers."""

DELTA_FILE = "delta"
"""The only file of a published delta."""

_SERVICE = "swarm.shardcast.delta:DeltaService"

FetchDelta = Callable[[Checkpoint, float], Awaitable[str]]
"""Fetches a delta like a checkpoint, within a number of seconds: its folder."""


class Deltas:
    """Publishes checkpoints with their deltas, and fills checkpoints from deltas."""

    def __init__(self, store: CheckpointStore, compute: Compute, events: Events) -> None:
        self._store = store
        self._compute = compute
        self._events = events
        self._waiting: list[tuple[Key, trio.CancelScope]] = []
        """Deltas that are being fetched, each with the scope that ends the fetch when it stalls."""
        store.watch(self._changed)

    # --- publishing --------------------------------------------------------------------------

    async def publish(
        self,
        folder: str,
        lineage: int,
        step: int,
        *,
        mirrors: Sequence[str] = (),
        adapts: CheckpointReference | None = None,
    ) -> Held:
        """Publish a folder (`CheckpointStore.publish`), with a delta against the newest older
        checkpoint if the delta is smaller than half. All is durable before this returns.

        `adapts`: the base of an adapter, whose deltas lead from older adapters of that base."""
        key = (lineage, step)
        known = self._store.held(key)
        links: list[DeltaLink] = []
        built: list[CheckpointManifest] = []

        async def hash_folder() -> None:
            run = self._store.run
            built.append(await build(self._store.disk, folder, run=run, lineage=lineage, step=step))

        failed: list[BaseException] = []
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hash_folder)
                if known is None or not known.complete:
                    links = await self._encode(folder, key, adapts)
        except* (SwarmError, OSError) as group:
            failed += leaf_errors(group)
        if failed:
            raise failed[0]
        manifest = msgspec.structs.replace(
            built[0], deltas=links, mirrors=list(mirrors), base=adapts
        )
        return await self._store.publish(folder, lineage, step, manifest=manifest)

    def _base(self, key: Key, adapts: CheckpointReference | None) -> Held | None:
        """The newest complete checkpoint of this lineage before `key`, if it adapts the same."""
        older = [other for other in self._store.complete() if other < key and other[0] == key[0]]
        newest = self._store.held(older[-1]) if older else None
        return newest if newest is not None and newest.manifest.base == adapts else None

    async def _encode(
        self, folder: str, key: Key, adapts: CheckpointReference | None
    ) -> list[DeltaLink]:
        """Publish the delta to the checkpoint in `folder`; returns the chain for its manifest."""
        base = self._base(key, adapts)
        if base is None or base.manifest.total_bytes < DELTA_CHECKPOINT_BYTES_MIN:
            return []
        try:
            with self._store.pinned(base.key):
                held = await self._encode_against(base, folder, key)
        except SwarmError as error:  # a delta only saves bytes: publish without it
            self._events.emit("shardcast.delta_failed", step=key[1], reason=str(error))
            return []
        if held is None:
            return []
        link = DeltaLink(
            base_step=base.key[1],
            base=base.digest,
            manifest=held.digest,
            manifest_bytes=held.manifest_bytes,
            total_bytes=held.manifest.total_bytes,
        )
        return [link, *base.manifest.deltas][: limits.DELTA_CHAIN_MAX]

    async def _encode_against(self, base: Held, folder: str, key: Key) -> Held | None:
        disk = self._store.disk
        making = f"{ROOT}/{ENCODING_NAME}"
        # Left by a crash between the delta and its checkpoint: it was never announced.
        await self._store.withdraw(delta_key(key))
        await disk.remove(making)
        await disk.write(f"{making}/{DELTA_FILE}", b"")
        total = base.manifest.total_bytes
        try:
            async with self._compute.child(
                _SERVICE, name="delta", memory_limit_bytes=DELTA_CHILD_BYTES_MAX
            ) as child:
                made = await client(DeltaService, child).encode(
                    EncodeDelta(
                        base=str(disk.local_path(base.folder)),
                        new=str(disk.local_path(folder)),
                        out=str(disk.local_path(f"{making}/{DELTA_FILE}")),
                        names=[file.name for file in base.manifest.files],
                        limit_bytes=int(total * DELTA_SHARE_MAX),
                    )
                )
            self._events.emit(
                "shardcast.delta_encoded",
                step=key[1],
                base=base.key[1],
                bytes_full=total,
                **msgspec.structs.asdict(made),
            )
            if not made.size_bytes:
                return None
            return await self._store.publish(making, key[0], key[1], is_delta=True)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                await disk.remove(making)

    # --- catching up -------------------------------------------------------------------------

    async def fill(self, held: Held, fetch: FetchDelta) -> None:
        """Make missing pieces of a checkpoint from the cheapest chain of deltas, if there is one.

        A failure is reported as an event; pieces still missing then have to be fetched in full."""
        chain = self._cheapest(held)
        if chain is None:
            return
        base, links = chain
        now = trio.current_time()
        # If the chain fails, the full pieces need the rest of the time that this fetch has left.
        ends_at = now + DELTA_TIME_SHARE * (trio.current_effective_deadline() - now)
        try:
            with self._store.pinned(base.key, *(key for key, _ in links)):
                # One after the other: each is fetched from many sources at once already.
                folders = [await self._fetch_one(key, link, fetch, ends_at) for key, link in links]
                made = await self._make(held, base, folders)
            self._events.emit(
                "shardcast.delta_applied",
                step=held.key[1],
                base=base.key[1],
                deltas=len(links),
                bytes_deltas=sum(link.total_bytes for _, link in links),
                bytes_made=made,
            )
        except Exception as error:
            errors = leaf_errors(error)  # errors of a fetch's lanes come as a group
            expected = all(isinstance(each, SwarmError | OSError) for each in errors)
            if not expected or self._store.held(held.key) is not held:  # withdrawn meanwhile
                raise errors[0] from error
            self._events.emit("shardcast.delta_failed", step=held.key[1], reason=str(errors[0]))

    def _cheapest(self, held: Held) -> tuple[Held, list[tuple[Key, DeltaLink]]] | None:
        """A complete base, and the deltas that lead from it, oldest first, with their keys.

        The shortest chain is the cheapest: each further delta only adds bytes."""
        missing = sum(held.manifest.pieces[index].size_bytes for index in held.missing())
        chain: list[tuple[Key, DeltaLink]] = []
        cost, step = 0, held.key[1]
        for link in held.manifest.deltas:
            cost += link.manifest_bytes + link.total_bytes
            if cost > missing * DELTA_SHARE_MAX:
                return None
            chain.insert(0, (delta_key((held.key[0], step)), link))
            base = self._store.blobs.named(link.base)
            if base is not None and base.complete and not base.is_delta:
                return base, chain
            step = link.base_step
        return None

    async def _fetch_one(self, key: Key, link: DeltaLink, fetch: FetchDelta, ends_at: float) -> str:
        """The folder of a delta. Raises `DeadlineError` when nothing of it arrives for
        `DELTA_STALL_SECONDS`: perhaps no peer has it any more."""
        checkpoint = Checkpoint(
            reference=CheckpointReference(
                lineage=key[0], step=key[1], digest=link.manifest, size_bytes=link.manifest_bytes
            ),
            total_bytes=link.total_bytes,
        )
        now = trio.current_time()
        with trio.CancelScope(deadline=now + DELTA_STALL_SECONDS) as scope:
            self._waiting.append((key, scope))
            try:
                folder = await fetch(checkpoint, max(0.0, ends_at - now))
            finally:
                self._waiting.remove((key, scope))
        found = self._store.held(key)
        if scope.cancelled_caught:
            here = f"{sum(found.pieces)} of {len(found.pieces)} pieces" if found else "no manifest"
            raise DeadlineError(
                f"no piece of the delta to step {key[1]} arrived for "
                f"{DELTA_STALL_SECONDS:g} s ({here} here)"
            )
        if found is None or [file.name for file in found.manifest.files] != [DELTA_FILE]:
            raise BadManifest(f"the file named as the delta to step {key[1]} is not a delta")
        return folder

    def _changed(self, change: Change, held: Held, index: int) -> None:
        """Extend the deadline of a delta of which something arrived."""
        if change in (Change.BEGUN, Change.PIECE):
            for key, scope in self._waiting:
                if key == held.key:
                    scope.deadline = trio.current_time() + DELTA_STALL_SECONDS

    async def _make(self, held: Held, base: Held, folders: Sequence[str]) -> int:
        """Let a child make the missing pieces; returns the bytes of those that came out right.

        The SHA-256 of each file is computed while the pieces after it are still being made."""
        local = self._store.disk.local_path
        pieces, files = held.manifest.pieces, held.manifest.files
        done_bytes = 0
        growth = _Growth(held)
        async with (
            self._compute.child(
                _SERVICE, name="delta", memory_limit_bytes=DELTA_CHILD_BYTES_MAX
            ) as child,
            trio.open_nursery() as nursery,
        ):
            held.unproven.update(range(len(files)))
            nursery.start_soon(self._check_growing, held, growth)
            for indices in _portions(held):
                wanted = [
                    PieceToMake(
                        index, files[piece.file].name, piece.offset, piece.size_bytes, piece.digest
                    )
                    for index, piece in ((index, pieces[index]) for index in indices)
                ]
                result = await client(DeltaService, child).make(
                    MakePieces(
                        base=str(local(base.folder)),
                        target=str(local(held.folder)),
                        deltas=[str(local(f"{folder}/{DELTA_FILE}")) for folder in folders],
                        pieces=wanted,
                    )
                )
                for index in result.made:
                    done_bytes += pieces[index].size_bytes
                    self._store.landed(held, index)
                growth.note()
            growth.note(over=True)
        return done_bytes

    async def _check_growing(self, held: Held, growth: "_Growth") -> None:
        file_of_piece = [piece.file for piece in held.manifest.pieces]
        for file, described in enumerate(held.manifest.files):
            first = file_of_piece.index(file) if described.size_bytes else 0
            with suppress(_NotMade):  # then it is checked once its other pieces were fetched
                ready = partial(growth.ready, first, described.size_bytes)
                await self._store.check_file(held, file, ready)


class _NotMade(Exception):
    """No delta gives the next piece of a file."""


class _Growth:
    """How far each file of a checkpoint is there whose pieces are being made in order."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._over = False
        self._grown = trio.Event()

    def note(self, *, over: bool = False) -> None:
        """Note that further pieces were made; `over`: these were the last."""
        self._over = over
        self._grown.set()
        self._grown = trio.Event()

    async def ready(self, first: int, size_bytes: int, offset: int) -> int:
        """See `swarm.world.Ready`, of a file of `size_bytes` that begins with the piece `first`;
        raises `_NotMade`."""
        piece_size, there = self._held.manifest.piece_size, self._held.pieces
        index = first + offset // piece_size
        while not there[index]:
            if self._over:
                raise _NotMade
            await self._grown.wait()
        missing = there.find(0, index)
        end = missing if missing >= 0 else len(there)
        return min(offset + (end - index) * piece_size, size_bytes)


def _portions(held: Held) -> Iterator[list[int]]:
    portion: list[int] = []
    size = 0
    for index in held.missing():
        portion.append(index)
        size += held.manifest.pieces[index].size_bytes
        if size >= DELTA_BYTES_PER_CALL:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion
