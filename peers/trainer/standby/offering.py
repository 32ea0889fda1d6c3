"""The trainer's side: it bundles its newest state when a standby asks for one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import trio

from peers.trainer.saving import SavedStates, State
from peers.trainer.standby.bundle import (
    ANSWER_SECONDS,
    FRAME_BYTES_MAX,
    PROTOCOL,
    REACH_SECONDS,
    Asked,
    Contents,
    Offer,
    encrypted,
)
from peers.trainer.store import TrainerStore
from swarm.errors import DECODE_ERRORS, SwarmError, leaf_errors
from swarm.node.run_node import RunNode
from swarm.shardcast.held import Held
from swarm.shardcast.store import CheckpointStore
from swarm.transport import Stream, StreamError
from swarm.wire.identity import sealed_for
from swarm.world.observable import Observable

ROOT = "bundles"
MAKING = "trainer/bundle"

BUNDLES_KEPT = 2
"""The newest, and one that a slow standby may still be fetching."""


HAND_OVER_SECONDS = 600.0
"""Longest time that a trainer whose run is over waits for its standbys to fetch the last state."""

HAND_OVER_REPORT_SECONDS = 30.0
"""Interval at which it says for whom it waits."""

HAND_OVER_LOOK_SECONDS = 5.0
"""Interval at which it looks whether they are still connected."""


class _Heard(NamedTuple):
    """What a standby asked last: the state that it has, and when."""

    state: State
    at: float


@dataclass(frozen=True)
class _Made:
    state: State
    held: Held
    contents: Contents
    named: list[str]
    """The standbys that know its secret."""


@dataclass(eq=False)
class Offering:
    """Makes bundles, and serves them to the run's standbys only."""

    peer: RunNode
    states: SavedStates
    store: TrainerStore
    seconds_min: float
    """Least time between two bundles."""
    _made: _Made | None = None
    _made_at: float = 0.0
    _making: trio.Lock = field(default_factory=trio.Lock)
    _heard: dict[str, _Heard] = field(default_factory=dict)
    """The last question of each standby, by peer id."""
    _asked: Observable[None] = field(default_factory=lambda: Observable(None))
    _ending: bool = False
    """Whether the run is over: the last state is bundled at once."""

    def __post_init__(self) -> None:
        node = self.peer.node
        self._bundles = CheckpointStore(
            node.disk, self.peer.run.id, node.events, keep=BUNDLES_KEPT, root=ROOT
        )

    async def open(self) -> None:
        """Drop the bundles of an earlier process, whose secret is forgotten, and answer."""
        disk = self.peer.node.disk
        await disk.remove(ROOT)
        await disk.remove(MAKING)
        self.peer.blobs.serve_also(
            self._bundles, lambda client: client in self.peer.run.manifest.standby_ids()
        )
        self.peer.node.transport.serve(PROTOCOL, self._answer, frame_bytes_max=FRAME_BYTES_MAX)

    async def _answer(self, stream: Stream) -> None:
        try:
            with trio.fail_after(REACH_SECONDS):
                raw = await stream.receive()
            if raw is None or stream.peer not in self.peer.run.manifest.standby_ids():
                return
            asked = msgspec.msgpack.decode(raw, type=Asked)
            state = State(asked.lineage, asked.step)
            self._heard[stream.peer] = _Heard(state, self.peer.node.world.now())
            self._asked.touch()
            made = await self._newer_than(state)
            if made is not None and stream.peer in made.named:
                contents = msgspec.msgpack.encode(made.contents)
                sealed = sealed_for(stream.peer, contents)
                total = made.held.manifest.total_bytes
                offer = Offer(made.held.reference, total, sealed)
                await stream.send(msgspec.msgpack.encode(offer))
            await stream.end()
        except (StreamError, SwarmError, OSError, trio.TooSlowError, *DECODE_ERRORS) as error:
            self.peer.node.events.emit(
                "trainer.bundle_not_offered", remote=stream.peer, reason=str(error)
            )
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.reset()

    async def _newer_than(self, asked: State) -> _Made | None:
        """Return a bundle of a state newer than `asked`; make it once it is due."""
        world = self.peer.node.world
        until = world.now() + ANSWER_SECONDS
        while True:
            async with self._making:
                named = self.peer.run.manifest.standby_ids()
                made = self._made
                if made is not None and made.state > asked and made.named == named:
                    return made
                due = self._made_at + self.seconds_min if made and not self._ending else 0.0
                newest = self.states.changed.value
                if newest is not None and newest > asked and world.now() >= due:
                    return await self._make(newest, named)
            now = world.now()
            if now >= until or (self._ending and (newest is None or newest <= asked)):
                return None
            wake = until if newest is None or newest <= asked else min(until, due)
            with trio.move_on_after(wake - now):
                await self.states.changed.wait_change()

    async def hand_over(self) -> None:
        """Wait until the standbys that follow this trainer have its last state, or
        `HAND_OVER_SECONDS`. One that is no longer connected is not waited for."""
        last = self.states.changed.value
        if last is None:
            return
        self._ending = True
        self.states.changed.touch()
        world, ends_at = self.peer.node.world, self.peer.node.world.now() + HAND_OVER_SECONDS
        says_at = world.now()
        while lacking := self._lacking(last):
            if world.now() >= min(says_at, ends_at):
                says_at = world.now() + HAND_OVER_REPORT_SECONDS
                self.peer.status.doing = "run over; handing the last state over to a standby"
                self.peer.node.events.emit(
                    "trainer.handing_over",
                    step=last.step,
                    waiting_for=lacking,
                    seconds_left=max(0.0, ends_at - world.now()),
                )
            if world.now() >= ends_at:
                return
            with trio.move_on_after(min(HAND_OVER_LOOK_SECONDS, ends_at - world.now())):
                await self._asked.wait_change()

    def _lacking(self, last: State) -> list[str]:
        """The standbys that are here, and have not said that they have the last state."""
        connected = self.peer.node.transport.connected()
        recent = self.peer.node.world.now() - ANSWER_SECONDS - REACH_SECONDS
        return [
            standby
            for standby, heard in sorted(self._heard.items())
            if standby in self.peer.run.manifest.standby_ids()
            and heard.state < last
            and (standby in connected or heard.at > recent)
        ]

    async def _make(self, state: State, named: list[str]) -> _Made:
        """Bundle a state. A new set of standbys gets a new secret.

        Raises `SwarmError` or `OSError`.
        """
        node, before = self.peer.node, self._made
        same = before is not None and before.named == named
        secret = before.contents.secret if before and same else node.world.secret_bytes(32)
        began = node.world.now()
        await node.disk.remove(MAKING)  # if the one before was cut off
        try:
            with self.states.keeping(state):
                files = await encrypted(node.disk, state.folder, MAKING, secret)
            if before is not None and before.state == state:
                self._made = None  # it is withdrawn, also if the new one fails
            await self._bundles.withdraw((state.lineage, state.step))
            held = await self._bundles.publish(MAKING, state.lineage, state.step)
        except (SwarmError, OSError, ExceptionGroup) as error:
            await node.disk.remove(MAKING)  # the trainer needs the room
            if isinstance(error, ExceptionGroup):  # of the files hashed at once
                raise leaf_errors(error)[0] from error
            raise
        orders = self.store.newest_orders(state.lineage, 1)
        contents = Contents(
            run=self.peer.run.id,
            lineage=state.lineage,
            step=state.step,
            saved_ms=int(node.world.wall_time() * 1000),
            secret=secret,
            files=files,
            order=msgspec.msgpack.encode(orders[0]) if orders else b"",
        )
        self._made, self._made_at = _Made(state, held, contents, list(named)), node.world.now()
        node.events.emit(
            "trainer.bundle_made",
            step=state.step,
            lineage=state.lineage,
            bytes=held.manifest.total_bytes,
            seconds=self._made_at - began,
        )
        return self._made
