"""Outer states and contributions as artifacts of the piece plane.

Both are published like checkpoints, so every trainer that has a piece serves it, and a fetch is
resumed. Lineage is the round, and step a hash, so that the store keeps the newest rounds."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import trio
from blake3 import blake3

from swarm.errors import PeerError, SwarmError
from swarm.node.run_node import RunNode
from swarm.shardcast.held import Held
from swarm.shardcast.manifest import BadManifest, CheckpointManifest, build
from swarm.shardcast.store import CheckpointConflict
from swarm.transport import Source
from swarm.wire.identity import PeerId
from swarm.wire.messages import Checkpoint, CheckpointReference
from swarm.wire.outer import Contribution

FOLDER = "outer"
"""Folder of what is not published: new states, inner states, the exported model."""

STALLED_SECONDS = 60.0
"""A fetch without a new piece for this long is given up: nobody has the artifact any more."""

FETCHES_AT_ONCE = 16
"""Fetches at once. A round of 60 trainers has a hundred; each asks for pieces and looks for sources
by itself, so all together would share the line with more requests than it can answer in time."""

STUCK_SECONDS = 10.0
"""A fetch without a new piece for this long makes room for another one, and asks everybody."""


def _number(*parts: bytes) -> int:
    """A number of 52 bits that names an artifact within its round."""
    return int.from_bytes(blake3(b"\x00".join(parts)).digest()[:8], "big") >> 12


def state_key(record: bytes, round: int) -> tuple[int, int]:
    """Lineage and step under which the outer state after a record is published."""
    return round, _number(b"state", record)


def contribution_key(trainer: str, base: bytes, round: int) -> tuple[int, int]:
    """The same of a trainer's contribution, by the record that it began from and its round."""
    return round, _number(b"contribution", trainer.encode(), base)


@dataclass(eq=False)
class Artifacts:
    """Publishes, fetches and drops artifacts. Folders are paths on the peer's disk."""

    peer: RunNode
    _partial: set[tuple[int, int]] = field(default_factory=set)
    """Contributions of which only some shards were fetched: the store would trim them."""
    _turns: trio.Semaphore = field(default_factory=lambda: trio.Semaphore(FETCHES_AT_ONCE))

    def local(self, folder: str) -> str:
        """The path of a folder or file on this machine, as jobs name it."""
        return str(self.peer.node.disk.local_path(folder))

    def folder(self, reference: CheckpointReference, folders: Collection[str] = ()) -> str | None:
        """The folder of an artifact that is complete on this disk, or whose `folders` are."""
        held = self.peer.store.held((reference.lineage, reference.step))
        if held is None or held.digest != reference.digest:
            return None
        if not held.complete and (not folders or held.missing(folders)):
            return None
        return held.folder

    # --- outer states ------------------------------------------------------------------------

    def new_state_folder(self, record: bytes) -> str:
        """The folder to which the outer state after a record is written."""
        return f"{FOLDER}/state-{record.hex()[:32]}"

    def state_folder(self, record: bytes, round: int) -> str | None:
        """The folder of the outer state after a record, published or not; None: it is not here."""
        held = self.peer.store.held(state_key(record, round))
        if held is not None and held.complete:
            return held.folder
        folder = self.new_state_folder(record)
        return folder if self.peer.node.disk.exists(folder) else None

    def published(self, record: bytes, round: int) -> CheckpointReference | None:
        """The reference of an outer state that is published here."""
        held = self.peer.store.held(state_key(record, round))
        return held.reference if held is not None and held.complete else None

    async def hash_state(self, record: bytes, round: int) -> CheckpointManifest:
        """Hash an outer state that is to be published. Its folder is only read."""
        folder = self.new_state_folder(record)
        lineage, step = state_key(record, round)
        disk, run = self.peer.node.disk, self.peer.run.id
        return await build(disk, folder, run=run, lineage=lineage, step=step)

    async def publish_state(self, record: bytes, manifest: CheckpointManifest) -> None:
        """Publish a hashed state, whose folder moves."""
        folder = self.new_state_folder(record)
        await self.peer.store.publish(folder, manifest.lineage, manifest.step, manifest=manifest)

    async def drop_state(self, record: bytes, round: int) -> None:
        await self.peer.node.disk.remove(self.new_state_folder(record))
        lineage, step = state_key(record, round)
        await self.peer.store.withdraw((lineage, step))

    # --- contributions -----------------------------------------------------------------------

    async def publish_contribution(self, folder: str, base: bytes, round: int) -> Held:
        """`round` is that of the base."""
        _, number = contribution_key(self.peer.peer_id, base, round)
        try:
            return await self.peer.store.publish(folder, round, number)
        except CheckpointConflict:  # made and never announced, because this process died then
            await self.peer.store.withdraw((round, number))
            return await self.peer.store.publish(folder, round, number)

    async def fetch(
        self,
        reference: CheckpointReference,
        name: str,
        total_bytes: int = 0,
        folders: Collection[str] = (),
        holders: Collection[str] = (),
    ) -> str:
        """Return the folder of an artifact; fetch it if missing, or some `folders` of it. The log
        calls it `name`. An artifact of another size than `total_bytes` is not fetched; 0: any size.
        `holders`: who says to have it, and is asked first.

        Raises `PeerError` when no further piece arrives, and the errors of
        `swarm.shardcast.fetch.fetcher.Fetcher.fetch`."""
        folder = self.folder(reference, folders)
        if folder is not None:
            return folder
        key = (reference.lineage, reference.step)
        if folders and key not in self._partial:
            self._partial.add(key)
            self.peer.store.pin(key)
        failed: list[Exception] = []
        policies, asked = self.peer.policies, sorted(holders)

        def sources() -> list[Source]:
            # Of sixty trainers one or two have a part: to ask the others costs each a refusal.
            near = policies.claiming(reference.digest, asked) if asked else []
            return near or policies.sources(reference.digest)

        async def fetch(scope: trio.CancelScope) -> None:
            nonlocal folder
            try:
                folder = await policies.fetcher.fetch(
                    Checkpoint(reference=reference, total_bytes=total_bytes),
                    sources,
                    name=name,
                    folders=folders,
                    plain=True,
                )
            except (SwarmError, OSError) as error:  # raised below, outside the nursery's group
                failed.append(error)
            scope.cancel()

        await self._turns.acquire()
        with ExitStack() as turn:
            turn.callback(self._turns.release)
            turn.callback(asked.clear)
            for holder in map(PeerId, holders):
                # With many trainers not everybody has heard everybody's addresses.
                if holder != self.peer.peer_id and self.peer.node.record(holder) is None:
                    with suppress(SwarmError), trio.move_on_after(STUCK_SECONDS):
                        await self.peer.node.find_record(holder)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fetch, nursery.cancel_scope)
                await self._until_stalled(reference, turn)
                nursery.cancel_scope.cancel()
        if failed:
            raise failed[0]
        if folder is None:
            raise PeerError(
                f"artifact {reference.digest.hex()[:12]} of round {reference.lineage} is not "
                f"complete, and no piece of it has arrived for {STALLED_SECONDS:g} s"
            )
        return folder

    async def _until_stalled(self, reference: CheckpointReference, turn: ExitStack) -> None:
        """Wait until no new piece of an artifact has arrived for `STALLED_SECONDS`; end its turn
        when none has for `STUCK_SECONDS`."""
        before, since = -1, trio.current_time()
        while trio.current_time() < since + STALLED_SECONDS:
            await trio.sleep(STUCK_SECONDS)
            held = self.peer.store.held((reference.lineage, reference.step))
            now = sum(held.pieces) if held is not None else -1
            if now == before:
                turn.close()
            else:
                before, since = now, trio.current_time()

    async def fetch_contribution(
        self,
        contribution: Contribution,
        total_bytes: int = 0,
        shards: Sequence[int] = (),
        holders: Collection[str] = (),
    ) -> str:
        """Return the folder of a contribution, as `fetch`; with `shards`, only these are there.

        Raises `BadManifest` if its files have the name of something else."""
        name = f"a contribution from round {contribution.base_round}"
        reference = contribution.artifact
        key = reference.lineage, reference.step
        made = contribution.trainer, contribution.base, contribution.base_round
        if key != contribution_key(*made):
            raise BadManifest("its artifact is not named by its trainer and its base")
        held = self.peer.store.held(key)
        if held is not None and held.complete and held.digest != reference.digest:
            await self.peer.store.withdraw(key)  # its trainer gave others other files
        folders = [str(shard) for shard in shards]
        holders = [contribution.trainer, *holders]
        return await self.fetch(reference, name, total_bytes, folders, holders)

    # --- merged shards -----------------------------------------------------------------------

    def new_shard_folder(self, record: bytes, shard: int) -> str:
        """The folder to which the mean of a shard is written."""
        return f"{FOLDER}/shard-{record.hex()[:32]}-{shard}"

    async def publish_shard(self, folder: str, record: bytes, round: int, shard: int) -> Held:
        """`round` is that of the record."""
        number = _number(b"shard", self.peer.peer_id.encode(), record, bytes([shard]))
        await self.peer.store.withdraw((round, number))
        return await self.peer.store.publish(folder, round, number)

    async def drop_before(self, round: int) -> None:
        """Delete the artifacts of older rounds."""
        for key in [key for key in self._partial if key[0] < round]:
            self._partial.remove(key)
            self.peer.store.unpin(key)
        for held in self.peer.store.all():
            if held.manifest.lineage < round:
                await self.peer.store.withdraw(held.key)
