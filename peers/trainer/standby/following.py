"""The standby's side: it keeps the trainer's newest bundle until it takes the trainer's place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import trio

from peers.trainer.saving import INHERITED, ORDER, UNPACKING, State
from peers.trainer.standby.bundle import (
    REACH_SECONDS,
    Asked,
    BadBundle,
    Contents,
    Offer,
    ask,
    decrypted,
    parse_contents,
    sealed_sizes,
)
from peers.trainer.standby.offering import MAKING
from peers.trainer.standby.offering import ROOT as BUNDLES
from swarm.errors import PeerError, SwarmError
from swarm.node.run_node import RunNode
from swarm.shardcast.fetch.fetcher import Fetcher
from swarm.shardcast.held import Change, Held, read_back
from swarm.shardcast.store import CheckpointStore
from swarm.transport import Source
from swarm.wire.identity import PeerId
from swarm.wire.messages import Checkpoint
from swarm.world import Disk
from swarm.world.observable import Observable

ROOT = "standby"
CONTENTS = ".contents"
NONE = State(-1, -1)

RETRY_SECONDS = 5.0
"""Pause before a trainer that failed to answer is asked again, and least time from one question to
the next if it offers nothing: it should hold back its answer for longer, and may not."""

STALLED_SECONDS = 60.0
"""A fetch without a new piece for this long is given up: the trainer may be gone, or has dropped
the bundle for a newer one."""


LAST_STATE_SECONDS = 600.0
"""Longest time that a standby waits for the trainer's last state once the run has ended."""

LAST_ATTEMPTS_MAX = 3
"""Failed questions for it, after which the trainer counts as gone."""

SHOW_SECONDS = 30.0
"""Interval at which a standby says how old its bundle is."""


def _contents_file(state: State) -> str:
    return f"{ROOT}/{state.lineage}-{state.step}{CONTENTS}"


def holds_bundle(disk: Disk) -> bool:
    """Whether a standby's bundle is on this disk: one is deleted once it is unpacked."""
    return any(name.endswith(CONTENTS) for name in disk.list(ROOT))


async def whole_bundle(disk: Disk, run: str) -> State | None:
    """State of the newest bundle on this disk that has every piece; None: there is none."""
    found = [NONE]
    for name in disk.list(ROOT):
        lineage, _, step = name.removesuffix(CONTENTS).partition("-")
        if name.endswith(CONTENTS) and lineage.isdecimal() and step.isdecimal():
            state = State(int(lineage), int(step))
            held = await read_back(disk, run, f"{ROOT}/{lineage}-{step}", tuple(state[:2]))
            if held is not None and not held.missing():
                found.append(state)
    return max(found) if len(found) > 1 else None


class StandingBy:
    """Follows the run's trainer. Its disk holds the newest whole bundle, and one in transfer."""

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._node = node = peer.node
        self._store = CheckpointStore(node.disk, peer.run.id, node.events, keep=1, root=ROOT)
        self._fetcher = Fetcher(node.world, node.transport, self._store, node.events)
        self._stalling: trio.CancelScope | None = None
        self._store.watch(self._on_piece)
        self.newest = NONE
        """State of the newest whole bundle."""
        self._since_ms = int(node.world.wall_time() * 1000)
        """When the trainer made that bundle, or when this process began to wait for one."""
        self._bytes = 0
        self._changed = Observable(None)
        """Touched when a bundle has arrived, or none will any more."""
        self._trainer_gone = False

    async def until_trainer(self) -> bool:
        """Follow the trainer until the run's manifest names this peer in its place.

        The newest bundle is then a state on this disk (`SavedStates.inherited`), and nothing of it,
        or of one in transfer, is left. Returns False, and keeps the bundle, if the run has ended.
        """
        await self._store.recover()
        for lineage, step in self._store.complete():
            if self._node.disk.exists(_contents_file(State(lineage, step))):
                self.newest = State(lineage, step)
        if not self._peer.run.manifest.is_trainer(self._peer.peer_id) and await self._stand_by():
            return False
        if self.newest != NONE:
            await self._unpack(self.newest)
        self.newest = NONE
        await self._drop_all_but()
        await self._node.disk.remove(ROOT)  # also what the store does not count yet
        return True

    async def _stand_by(self) -> bool:
        """Keep the newest bundle until the manifest names this peer as the trainer, or the run has
        ended; return whether it has."""
        run = self._peer.run
        for made in (BUNDLES, MAKING):  # this peer may have been the trainer
            await self._node.disk.remove(made)
        if self.newest != NONE:
            sealed = await self._node.disk.read(_contents_file(self.newest))
            held = self._store.held((self.newest.lineage, self.newest.step))
            assert held is not None
            try:
                self._since_ms = self._opened(sealed).saved_ms
            except BadBundle as error:  # not deleted: it may be the only copy of the state
                raise BadBundle(
                    f"{error}; put the identity.key back with which this home got it, or remove "
                    f"the folder {ROOT} in this home, and the trainer is asked for another"
                ) from error
            self._bytes = held.manifest.total_bytes
        self._peer.blobs.serve_also(
            self._store, lambda client: client in run.manifest.standby_ids()
        )
        ended = False
        async with trio.open_nursery() as nursery:

            async def until_end() -> None:
                nonlocal ended
                await self._until_run_ends()
                ended = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_end)
            nursery.start_soon(self._show)
            while not run.manifest.is_trainer(self._peer.peer_id):
                await self._peer.versions.changed.wait_change()
            nursery.cancel_scope.cancel()
        return ended and not run.manifest.is_trainer(self._peer.peer_id)

    # --- following ---------------------------------------------------------------------------

    async def _until_run_ends(self) -> None:
        """Follow the trainer until the run has ended and nothing newer is to be had from it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            await self._peer.run_over()
            with trio.move_on_after(LAST_STATE_SECONDS):
                while self._steps_behind() and not self._trainer_gone:
                    await self._changed.wait_change()
            nursery.cancel_scope.cancel()
        with trio.move_on_after(REACH_SECONDS), suppress(SwarmError, OSError):
            # The trainer waits until this peer says what it has.
            trainer = PeerId(self._peer.run.manifest.trainer_ids()[0])
            await ask(self._peer, trainer, Asked(self.newest.lineage, self.newest.step))
        behind = self._steps_behind()
        self._peer.status.doing = "run over"
        self._node.events.emit("standby.run_over", step=self.newest.step, steps_behind=behind)

    def _steps_behind(self) -> int:
        """Steps of the run that a takeover would lose now."""
        order, announced = self._peer.step_order(), self._peer.newest_checkpoint()
        steps = [announced.step] if announced is not None else []
        if order is not None and order.final:
            steps.append(order.policy)
        return max(0, max(steps, default=0) - self.newest.step)

    async def _follow(self) -> None:
        failed = 0
        while not self._trainer_gone:
            trainer = PeerId(self._peer.run.manifest.trainer_ids()[0])
            asked_at = trio.current_time()
            try:
                offer = await ask(self._peer, trainer, Asked(self.newest.lineage, self.newest.step))
                if offer is not None:
                    await self._take(trainer, offer)
                else:
                    await trio.sleep_until(asked_at + RETRY_SECONDS)
                failed = 0
            except (SwarmError, OSError) as error:
                order = self._peer.step_order()
                failed += order is not None and order.final
                if failed >= LAST_ATTEMPTS_MAX:
                    self._trainer_gone = True
                    self._changed.touch()
                    return
                self._node.events.emit("standby.no_bundle", remote=trainer, reason=str(error))
                await trio.sleep(RETRY_SECONDS)

    async def _take(self, trainer: PeerId, offer: Offer) -> None:
        """Fetch a bundle; it replaces the one before once it is whole and durable."""
        contents = self._opened(offer.sealed)
        state = State(contents.lineage, contents.step)
        reference = offer.reference
        if State(reference.lineage, reference.step) != state or contents.run != self._peer.run.id:
            raise BadBundle("the offered bundle and its contents belong to different states")
        if state <= self.newest:
            raise BadBundle(
                f"the offered state of step {state.step} is not newer than the one held"
            )
        sizes = sealed_sizes(contents)
        if sum(sizes.values()) != offer.total_bytes:
            raise BadBundle(
                f"the offered bundle has {offer.total_bytes:,} bytes, and its contents list "
                f"{sum(sizes.values()):,}"
            )
        began = self._node.world.now()
        await self._drop_all_but(self.newest, state)  # of earlier offers, under another secret
        # First: whoever is stopped between a whole bundle and its contents could never open it.
        await self._node.disk.write(_contents_file(state), offer.sealed)
        with self._kept(self.newest):
            await self._fetch(trainer, offer, state)
            held = self._store.held((state.lineage, state.step))
            assert held is not None
            if {file.name: file.size_bytes for file in held.manifest.files} != sizes:
                await self._store.withdraw(held.key)
                raise BadBundle("the files of the offered bundle are not those of its contents")
        self.newest = state
        self._since_ms, self._bytes = contents.saved_ms, offer.total_bytes
        await self._drop_all_but(state)
        self._changed.touch()
        self._node.events.emit(
            "standby.bundle_received",
            step=state.step,
            lineage=state.lineage,
            bytes=offer.total_bytes,
            seconds=self._node.world.now() - began,
        )
        self._say()

    async def _fetch(self, trainer: PeerId, offer: Offer, state: State) -> None:
        """Fetch the files of a bundle; they are durable on return."""
        reference = offer.reference
        with trio.CancelScope(deadline=trio.current_time() + STALLED_SECONDS) as self._stalling:
            folder = await self._fetcher.fetch(
                Checkpoint(reference=reference, total_bytes=offer.total_bytes),
                lambda: self._sources(trainer),
                name=f"the state of step {state.step}",
            )
        if self._stalling.cancelled_caught:
            raise PeerError(
                f"no piece of the state of step {state.step} has arrived for {STALLED_SECONDS:g} s"
            )
        await self._node.disk.sync(folder)

    @contextmanager
    def _kept(self, state: State) -> Iterator[None]:
        """Keep a bundle inside this block, though the store would drop it for a newer one."""
        key = (state.lineage, state.step)
        self._store.pin(key)
        try:
            yield
        finally:
            self._store.unpin(key)

    async def _drop_all_but(self, *states: State) -> None:
        """Delete all bundles but those of some states, whole or not, and all other contents."""
        for held in self._store.all():
            if held.key not in [(state.lineage, state.step) for state in states]:
                await self._store.withdraw(held.key)
        for name in self._node.disk.list(ROOT):
            path = f"{ROOT}/{name}"
            if name.endswith(CONTENTS) and path not in map(_contents_file, states):
                await self._node.disk.remove(path)

    def _on_piece(self, change: Change, held: Held, index: int) -> None:
        if change == Change.PIECE and self._stalling is not None:
            self._stalling.deadline = trio.current_time() + STALLED_SECONDS

    def _sources(self, trainer: PeerId) -> list[Source]:
        """The trainer, and the other standbys."""
        others = [PeerId(each) for each in self._peer.run.manifest.standby_ids()]
        found = []
        for peer in [trainer, *(each for each in others if each != self._peer.peer_id)]:
            record = self._node.record(peer)
            found.append(Source(peer, tuple(record.bulk_addresses) if record else ()))
        return found

    def _opened(self, sealed: bytes) -> Contents:
        raw = self._node.identity.unsealed(sealed)
        if raw is None:
            raise BadBundle("the contents of the bundle are not sealed to this peer's key")
        return parse_contents(raw)

    async def _show(self) -> None:
        while True:
            self._say()
            await trio.sleep(SHOW_SECONDS)

    def _say(self) -> None:
        """Report the bundle's age, and how many steps of the run a takeover would lose now."""
        age = max(0.0, self._node.world.wall_time() - self._since_ms / 1000)
        has = "no state yet"
        if self.newest != NONE:
            size = f"{self._bytes / 1e6:.1f} MB"
            has = f"the state of step {self.newest.step} ({age:.0f} s old, {size})"
        self._peer.status.doing = f"standing by, with {has}"
        self._node.events.emit(
            "standby.standing_by",
            step=self.newest.step,
            lineage=self.newest.lineage,
            bytes=self._bytes,
            age_seconds=age,
            steps_behind=self._steps_behind(),
        )

    # --- taking over -------------------------------------------------------------------------

    async def _unpack(self, state: State) -> None:
        """Decrypt a bundle to a state that the trainer continues from.

        A peer that is stopped before the bundle is deleted does it again.
        """
        disk = self._node.disk
        held = self._store.held((state.lineage, state.step))
        assert held is not None and held.complete
        await disk.remove(UNPACKING)
        try:
            contents = self._opened(await disk.read(_contents_file(state)))
            await decrypted(
                disk, held.folder, contents, f"{UNPACKING}/{state.lineage}-{state.step}"
            )
        except BadBundle as error:
            raise BadBundle(
                f"{error}; remove the folder {ROOT} in this home, and begin with the run's newest "
                "policy by swarm trainer restore"
            ) from error
        if contents.order:
            await disk.write(f"{UNPACKING}/{ORDER}", contents.order)
        await disk.remove(INHERITED)
        await disk.rename(UNPACKING, INHERITED)
        await disk.sync(INHERITED)
        self._node.events.emit("standby.unpacked", step=state.step, lineage=state.lineage)
