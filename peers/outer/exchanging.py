"""Contributing an RL trainer's policy, and its answer, the merge (`swarm.jobs.merging_exchange`).

A snapshot is contributed once, under its own number, and answered once its contribution is in a
record of the chain, or can no longer be. The *anchor* is the outer state that the policy includes:
that of the newest answer, at first the base. It stays on this disk; its folder names the snapshot
and the record.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio

from peers.outer.chain import names_of
from peers.outer.child import ReplicaChild
from peers.outer.following import Following
from peers.outer.loop import OuterLoop
from peers.outer.store import OuterStore, Own
from swarm.jobs.merging_exchange import SnapshotSeen
from swarm.wire.outer import GENESIS

LOOK_SECONDS = 1.0
"""Time between two looks into the exchange folder; the RL trainer goes on meanwhile."""

_ANCHOR = "anchor"


class Anchor(NamedTuple):
    """An outer state that the RL trainer's policy includes."""

    number: int
    """Of the snapshot that it answered; 0: the base."""
    record: bytes

    @property
    def folder(self) -> str:
        return f"outer/{_ANCHOR}-{self.number}-{self.record.hex()}"


class Exchanging:
    """The replica's side of an exchange folder."""

    def __init__(
        self,
        loop: OuterLoop,
        following: Following,
        store: OuterStore,
        child: ReplicaChild,
        publish: Callable[[str, int, int], Awaitable[None]],
    ) -> None:
        """`publish(folder, number, steps)` publishes a contribution from the present state."""
        self._loop = loop
        self._following = following
        self._store = store
        self._child = child
        self._publish = publish
        self._disk = loop.peer.node.disk
        self._events = loop.peer.node.events

    async def run(self, over: Callable[[], bool]) -> None:
        """Contribute and answer snapshots until `over()`."""
        base = Anchor(0, GENESIS)
        if not self._anchors():
            await self._child.first_state(base.folder)
        while not over():
            if not await self._look():
                self._loop.peer.status.doing = "waiting for the RL trainer"
                with trio.move_on_after(LOOK_SECONDS):
                    await self._loop.changed.wait_change()

    def _anchors(self) -> list[Anchor]:
        """Anchors on this disk, oldest first."""
        parts = [name.split("-") for name in self._disk.list("outer")]
        return sorted(
            Anchor(int(part[1]), bytes.fromhex(part[2]))
            for part in parts
            if len(part) == 3 and part[0] == _ANCHOR and "." not in part[2]
        )

    async def _look(self) -> bool:
        """Do the next thing for the newest snapshot; False if there is nothing to do now."""
        seen = await self._child.look_for_snapshot()
        if not seen.number or seen.answered:
            return False
        own = self._store.own()
        if seen.problem:
            await self._refuse(seen, seen.problem)
        elif own and own[-1].number >= seen.number:
            return await self._answer_contributed(seen, own[-1])
        else:
            return await self._contribute(seen)
        return True

    async def _contribute(self, seen: SnapshotSeen) -> bool:
        head = self._following.state
        anchors = self._anchors()
        if self._following.is_behind():
            return False
        if seen.adopted < anchors[-1].number:
            # It has rolled back, or left an answer out: its weights include an older outer state.
            await self._answer(seen, None)
            return True
        if seen.adopted > anchors[-1].number:
            # This replica has lost its home. The policy keeps all that it has learned.
            state = self._following.folder(head.record)
            assert state is not None
            await self._child.keep_anchor(state, Anchor(seen.adopted, head.record).folder)
            return True
        if head.record in {each.contribution.base for each in self._store.own()}:
            return False
        self._loop.peer.status.step = head.round + 1
        self._loop.peer.status.doing = f"round {head.round + 1}: contributing"
        folder = f"outer/contribution-{seen.number}"
        problem = await self._child.contribute_snapshot(seen.number, anchors[-1].folder, folder)
        if problem:
            await self._refuse(seen, problem)
        elif self._following.record == head.record:
            await self._publish(folder, seen.number, max(1, seen.steps))
        return True

    async def _answer_contributed(self, seen: SnapshotSeen, own: Own) -> bool:
        """Answer a snapshot whose contribution counts, or cannot count any more."""
        head, chain = self._following.record, self._loop.chain
        if self._following.is_behind():
            return False
        path = chain.path(own.contribution.base, head)
        names = names_of(own.contribution)
        counted = any(not link.counted.isdisjoint(names) for link in path or [])
        if not counted and chain.refusal(own.contribution, head) is None:
            return False
        anchor = next((each for each in self._anchors() if each.number == seen.adopted), None)
        sent = self._loop.artifacts.folder(own.contribution.artifact) if counted else ""
        if anchor is None or sent is None:  # without its files: what it left out is lost
            await self._answer(seen, None)
        else:
            await self._answer(seen, anchor, sent, self._others(anchor.record, head))
        return True

    def _others(self, start: bytes, end: bytes) -> int:
        """Other trainers that have contributed between two records; 1 if that is unknown."""
        path = self._loop.chain.path(start, end)
        if path is None:
            return 1
        trainers = {each.trainer for link in path for each in link.record.contributions}
        return len(trainers - {self._loop.peer.peer_id})

    async def _answer(
        self, seen: SnapshotSeen, anchor: Anchor | None, sent: str = "", others: int = 1
    ) -> None:
        """Answer with the present outer state; without an anchor the policy takes it over."""
        head = self._following.state
        state = self._following.folder(head.record)
        assert state is not None
        adopted = Anchor(seen.number, head.record)
        problem = await self._child.answer_snapshot(
            seen.number,
            state=state,
            anchor=anchor.folder if anchor is not None else "",
            contribution=sent,
            keep=adopted.folder,
            round=head.round,
            trainers=others,
        )
        if problem:
            await self._refuse(seen, problem)
            return
        self._events.emit("outer.answered", number=seen.number, round=head.round, trainers=others)
        for old in self._anchors():
            if old != adopted:
                await self._disk.remove(old.folder)

    async def _refuse(self, seen: SnapshotSeen, problem: str) -> None:
        self._events.emit("outer.snapshot_refused", number=seen.number, reason=problem)
        await self._child.refuse_snapshot(seen.number, problem)
