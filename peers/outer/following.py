"""Following the chain: merge record after record, or fetch a newer outer state."""

from __future__ import annotations

from contextlib import suppress

import trio

from peers.outer.artifacts import Artifacts
from peers.outer.asking import ask
from peers.outer.chain import BadRecord, Chain, Link, lost
from peers.outer.child import ReplicaChild
from peers.outer.presence import Presence
from peers.outer.store import OuterStore, State
from swarm.envelope import Envelope
from swarm.errors import PeerError, SwarmError
from swarm.identity import PeerId
from swarm.node.run_node import RunNode
from swarm.observable import Observable
from swarm.outer import GENESIS, OuterStatus, RoundRecord
from swarm.shardcast.manifest import BadManifest
from swarm.world import ChildDied

RETRY_SECONDS = 5.0
"""Pause before a failed attempt to follow another trainer is repeated."""

RECORDS_ASKED_MAX = 4096
"""Records that a trainer asks for to connect another trainer's chain with its own."""

ATTEMPTS_MAX = 3
"""Failed attempts to get a record's outer state, or what leads to it, after which this trainer
stays on its own branch until another trainer announces a heavier one."""


class OtherState(SwarmError):
    """The outer state of this trainer is not the one that a record names."""


class Following:
    """The outer state that this trainer holds, and its way to the heaviest chain's."""

    def __init__(
        self,
        peer: RunNode,
        store: OuterStore,
        chain: Chain,
        presence: Presence,
        artifacts: Artifacts,
        changed: Observable[None],
    ) -> None:
        self._peer = peer
        self._store = store
        self._chain = chain
        self._presence = presence
        self._artifacts = artifacts
        self._changed = changed
        self._states: dict[bytes, State] = {}
        """States on this disk, by record."""
        self._record: bytes | None = None
        self.since = 0.0
        """When the present state was reached, in the world's seconds."""
        self._failed: dict[bytes, int] = {}
        """Failed attempts, by record."""
        self._said_lost: bytes | None = None
        """The last record of a branch that was reported as lost."""
        self._events = peer.node.events

    # --- the position ------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The present outer state."""
        assert self._record is not None
        return self._states[self._record]

    @property
    def record(self) -> bytes:
        """The record that the present outer state follows."""
        return self.state.record

    def is_behind(self) -> bool:
        """Whether there is a heavier chain to follow first."""
        return self._target() != self.record or self._ahead() is not None

    def folder(self, record: bytes) -> str | None:
        """The folder of the outer state after a record, if it is on this disk."""
        state = self._states.get(record)
        return self._artifacts.folder(state.reference) if state is not None else None

    async def begin(self, child: ReplicaChild) -> None:
        """Load the state of an earlier process, or make the state before the first round."""
        known = {state.record: state for state in self._store.states()}
        records = self._store.records()
        for envelope in records:
            with suppress(BadRecord):
                self._chain.add(envelope)
        for envelope in records:
            if envelope.digest in known:
                self._chain.begin_at(envelope)
        self._states = {
            record: state
            for record, state in known.items()
            if self._artifacts.folder(state.reference) is not None and record in self._chain
        }
        position = self._store.position()
        if position in self._states:
            self._record = position
        elif self._states:  # its files were deleted; the records since are merged again
            self._record = max(self._states.values(), key=lambda state: state.round).record
        else:
            folder = "outer/state-first"
            made = await child.first_state(folder)
            held = await self._artifacts.publish_state(folder, GENESIS, 0)
            await self._reach(State(GENESIS, 0, made.digest, held.reference))
        self.since = self._peer.node.world.now()

    async def _reach(self, state: State) -> None:
        """Make a published state the present one; it is durable on return."""
        await self._store.reach(state)
        self._states[state.record] = state
        self._record = state.record
        self.since = self._peer.node.world.now()
        self._changed.touch()

    async def _forget_old(self) -> None:
        """Delete the states that no contribution can begin from any more, and the contributions
        that nobody merges any more, who was not further behind than that."""
        staleness_max = self._peer.run.manifest.outer.staleness_max
        oldest = self.state.round - staleness_max - 1
        old = [record for record, kept in self._states.items() if kept.round < oldest]
        for record in old:
            state = self._states.pop(record)
            await self._artifacts.drop(state.reference)
        await self._store.drop_states_before(oldest)
        await self._artifacts.drop_before(oldest - staleness_max - 1)

    # --- records -----------------------------------------------------------------------------

    async def hear(self, envelope: Envelope) -> None:
        """Take over a record that arrived; it is durable before anything follows from it."""
        try:
            added = self._chain.add(envelope)
        except BadRecord as error:
            self._events.emit("outer.record_refused", signer=envelope.sender, reason=str(error))
            return
        for link in added:
            await self._store.keep_record(link.envelope)
        self._changed.touch()

    def _counts(self, link: Link) -> bool:
        """Whether a record can be the last of the chain that this trainer follows."""
        if self._failed.get(link.digest, 0) >= ATTEMPTS_MAX:
            return False
        return link.signer in self._peer.run.manifest.trainer_ids()

    def _target(self) -> bytes:
        """The last record of the heaviest known chain that can be followed."""
        return self._chain.best(self._counts)

    def _ahead(self) -> tuple[str, OuterStatus] | None:
        """A trainer whose state is on a heavier chain than all records here, if there is one."""
        target = self._target()
        weight = (-self._chain.tokens_of(target), target)
        found = [
            (-status.tokens, status.record, trainer, status)
            for trainer, status in self._presence.others().items()
            if status.record not in self._chain
            and self._failed.get(status.record, 0) < ATTEMPTS_MAX
            and (-status.tokens, status.record) < weight
        ]
        if not found:
            return None
        _, _, trainer, status = min(found, key=lambda each: each[:3])
        return trainer, status

    # --- following ---------------------------------------------------------------------------

    async def run(self, child: ReplicaChild) -> None:
        """Keep to the heaviest chain until cancelled. Raises `ChildDied`."""
        while True:
            wanted = b""
            try:
                ahead = self._ahead()
                if ahead is not None:
                    wanted = ahead[1].record
                    await self._learn(*ahead)
                    continue
                wanted = self._target()
                if wanted != self.record:
                    await self._advance(wanted, child)
                    self._failed.pop(wanted, None)
                    continue
            except ChildDied:
                raise
            except (SwarmError, OSError) as error:
                self._failed[wanted] = self._failed.get(wanted, 0) + 1
                self._events.emit(
                    "outer.behind",
                    round=self.state.round,
                    reason=str(error),
                    last=self._failed[wanted] >= ATTEMPTS_MAX,
                )
                await trio.sleep(RETRY_SECONDS)
                continue
            await self._changed.wait_change()

    async def _learn(self, trainer: str, status: OuterStatus) -> None:
        """Ask a trainer for the records that lead to its state."""
        records: list[Envelope] = []
        wanted = status.record
        while wanted not in self._chain and len(records) < RECORDS_ASKED_MAX:
            page = await ask(self._peer, PeerId(trainer), wanted)
            if not page:
                break
            records += page
            wanted = page[-1].expect(RoundRecord).parent
        for envelope in reversed(records):
            await self.hear(envelope)
        if status.record in self._chain:
            return
        if not records:
            raise PeerError(f"{trainer} does not hand out the record of its round {status.round}")
        for link in self._chain.begin_at(records[-1]):
            await self._store.keep_record(link.envelope)
        if status.record not in self._chain:
            raise PeerError(f"{trainer} hands out records that do not follow from each other")

    async def _advance(self, target: bytes, child: ReplicaChild) -> None:
        """Go to the state after a record of the chain."""
        fork = self._chain.fork(self.record, target)
        start = self._nearest_state(target)
        path = self._chain.path(start, target) if start is not None else None
        if fork != self.record and self._said_lost != self.record:
            self._said_lost = self.record
            self._say_lost(target)
        most = self._peer.run.manifest.outer.staleness_max + 1
        if path is None or len(path) > most:
            await self._recover(target, child)
            return
        try:
            for step in path:
                await self._merge(step, child)
        except ChildDied:
            raise
        except (OtherState, SwarmError) as error:
            self._events.emit("outer.not_merged", round=step.round, reason=str(error))
            await self._recover(target, child)

    def _nearest_state(self, target: bytes) -> bytes | None:
        """The newest record of a chain whose state is on this disk."""
        digest = target
        while digest not in self._states or self.folder(digest) is None:
            link = self._chain.get(digest)
            if link is None:
                return None
            digest = link.record.parent
        return digest

    def _say_lost(self, target: bytes) -> None:
        """Report what this trainer's branch has merged and the heavier one has not."""
        rounds = lost(self._chain, self.record, target)
        self._events.emit(
            "outer.branch_lost",
            rounds=[link.round for link in rounds],
            tokens=sum(part.tokens for link in rounds for part in link.record.contributions),
            contributions=sum(len(link.record.contributions) for link in rounds),
        )

    async def _merge(self, link: Link, child: ReplicaChild) -> None:
        """Merge one record's contributions, and go to the state that follows."""
        before = self._states[link.record.parent]
        if before.digest != link.record.state:
            raise OtherState(
                f"the outer state of round {before.round} differs from the one that {link.signer} "
                "has signed"
            )
        parts: list[tuple[str, str, int]] = []
        folders: dict[str, str] = {}
        failed: list[Exception] = []

        async def fetch(trainer: str, index: int) -> None:
            try:
                artifact = link.record.contributions[index].artifact
                folders[trainer] = await self._artifacts.fetch(artifact)
            except (SwarmError, OSError) as error:
                failed.append(error)

        async with trio.open_nursery() as nursery:
            for index, part in enumerate(link.record.contributions):
                nursery.start_soon(fetch, part.trainer, index)
        if failed:
            raise failed[0]
        parts = [
            (part.trainer, folders[part.trainer], part.tokens) for part in link.record.contributions
        ]
        begun = self._peer.node.world.now()
        folder = f"outer/state-{link.digest.hex()[:16]}"
        state = self.folder(link.record.parent)
        assert state is not None
        merged = await child.merge(state, parts, self._peer.run.manifest, folder)
        held = await self._artifacts.publish_state(folder, link.digest, link.round)
        await self._reach(State(link.digest, link.round, merged.digest, held.reference))
        self._events.emit(
            "outer.merged",
            round=link.round,
            record=link.digest,
            trainers=[trainer for trainer, _, _ in parts],
            left_out=[each.trainer for each in merged.left_out],
            tokens=link.record.tokens,
            state=merged.digest,
            seconds=self._peer.node.world.now() - begun,
        )
        for each in merged.left_out:
            self._events.emit(
                "outer.contribution_refused",
                trainer=each.trainer,
                base_round=link.round - 1,
                reason=each.problem,
            )
        await self._forget_old()

    async def _recover(self, target: bytes, child: ReplicaChild) -> None:
        """Fetch the newest outer state that leads to a record from a trainer that holds it."""
        own = self.state
        holders = [
            (status.round, trainer, status)
            for trainer, status in self._presence.others().items()
            if status.published is not None
            and status.record != own.record
            and self._chain.path(status.record, target) is not None
        ]
        if not holders:
            raise PeerError("no trainer offers the outer state of the heaviest chain")
        _, trainer, status = max(holders, key=lambda each: each[:2])
        assert status.published is not None
        begun = self._peer.node.world.now()
        folder = await self._artifacts.fetch(status.published)
        checked = await child.check_state(folder)
        if checked.problem or checked.digest != status.state:
            await self._artifacts.drop(status.published)
            raise BadManifest(
                f"the outer state that {trainer} offers cannot be used: "
                f"{checked.problem or 'its digest is not the one announced'}"
            )
        await self._reach(State(status.record, status.round, checked.digest, status.published))
        self._events.emit(
            "outer.recovered",
            round=status.round,
            trainer=trainer,
            seconds=self._peer.node.world.now() - begun,
        )
        await self._forget_old()
