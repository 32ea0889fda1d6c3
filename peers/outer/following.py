"""Following the chain: merge record after record, or fetch a newer outer state."""

import math
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

import trio

from peers.outer.artifacts import state_key
from peers.outer.chain import ROUNDS_KEPT, BadRecord, Link, lost, tokens_in
from peers.outer.gathering import SCORERS, measured, ranking
from peers.outer.presence import OuterLoop, ask
from peers.outer.rating import is_contradicted, weights
from peers.outer.sharing import TAKEOVER_SECONDS, Sharing
from peers.outer.store import OuterState, OuterStore
from swarm.errors import PeerError, SwarmError
from swarm.jobs.outer import CheckState, Contributed, FirstState, MergeRound, OuterService
from swarm.run.manifest import manifest_in
from swarm.shardcast.manifest import BadManifest, CheckpointManifest
from swarm.wire.envelope import Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import CheckpointReference
from swarm.wire.outer import GENESIS, OuterStatus, RoundRecord
from swarm.world import ChildDied
from swarm.world.recent import Recent

RETRY_SECONDS = 5.0
"""Pause before a failed attempt to follow another trainer is repeated."""

ATTEMPTS_MAX = 3
"""Failed attempts to get a record's outer state, or what leads to it, after which this trainer
goes on with its own branch for a while, unless another trainer announces a heavier one."""

GIVEN_UP_SECONDS = 60.0
"""Time after which a state that could not be reached is tried again: a disk may have room again.
Twice as long after each further failure."""

GIVEN_UP_DOUBLINGS_MAX = 6
"""So the longest pause is about an hour."""


class _Offer(NamedTuple):
    """An outer state that another trainer offers."""

    trainer: str
    state: OuterState
    reference: CheckpointReference


class _Failures(NamedTuple):
    """Failed attempts to reach a record's outer state."""

    number: int
    at: float
    """Time of the last one, in the world's seconds."""


class OtherState(SwarmError):
    """The outer state of this trainer is not the one that a record names."""


class Disowned(BadRecord):
    """A record states another outer state than most trainers have; it is not followed."""


class Following:
    """The outer state that this trainer holds, and its way to the heaviest chain's."""

    def __init__(self, loop: OuterLoop, store: OuterStore, sharing: Sharing) -> None:
        self._loop = loop
        self._sharing = sharing
        self._wrong: Recent[bytes, set[bytes]] = Recent(ROUNDS_KEPT)
        """By record, digests of outer states that had a wrong shard, which later records name."""
        self._store = store
        self._states: dict[bytes, OuterState] = {}
        """States on this disk, by record."""
        self._record: bytes | None = None
        self._held: tuple[int, int] | None = None
        """Its name as an artifact."""
        self.since = 0.0
        """When the present state was reached, in the world's seconds."""
        self._hashed: dict[bytes, CheckpointManifest] = {}
        """The manifest of the newest state, once it is hashed, until it is published."""
        self.moving = trio.Lock()
        """Held while a state's folder moves, and while a merge or a score reads one."""
        self._failed: Recent[bytes, _Failures] = Recent(ROUNDS_KEPT)
        """By record; by the trainer's id where its records could not be learned."""
        self._disowned: Recent[bytes, None] = Recent(ROUNDS_KEPT)
        """Records that state another outer state than most trainers have, oldest first."""
        self._passed_over: Recent[bytes, None] = Recent(ROUNDS_KEPT)
        """Records that were contradicted when this trainer had followed another one in their place:
        what others measured is not known for ever."""
        self._came: Recent[bytes, float] = Recent(ROUNDS_KEPT)
        """When each record arrived."""
        self._said_lost: bytes | None = None
        """The last record of a branch that was reported as lost."""
        self._lost = Counter[str]()
        """What lost branches had that is not in the log yet."""
        self.takes_part = False
        """Whether this process has begun inner steps: one that has just started follows the others,
        whatever they have done meanwhile."""
        self._events = loop.peer.node.events

    # --- the position ------------------------------------------------------------------------

    @property
    def state(self) -> OuterState:
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
        return self._loop.artifacts.state_folder(*state[:2]) if state is not None else None

    def folders(self) -> set[str]:
        """The folders of all states on this disk, wherever they are."""
        return {folder for record in self._states if (folder := self.folder(record)) is not None}

    def published(self) -> CheckpointReference | None:
        """The newest outer state of this chain that others can fetch here."""
        digest = self.record
        while digest in self._states:
            reference = self._loop.artifacts.published(digest, self._states[digest].round)
            if reference is not None:
                return reference
            link = self._loop.chain.get(digest)
            if link is None:
                return None
            digest = link.record.parent
        return None

    async def hash_states(self) -> None:
        """Hash each new state for its publication, beside the inner steps, until cancelled."""
        while True:
            state = self.state
            published = self._loop.artifacts.published(*state[:2])
            if state.record in self._hashed or published is not None:
                await self._loop.changed.wait_change()
                continue
            manifest = None
            try:
                manifest = await self._loop.artifacts.hash_state(*state[:2])
            except* (OSError, BadManifest):  # a newer one has replaced it
                pass
            if manifest is not None:
                self._hashed = {state.record: manifest}
            elif state.record == self.record:
                raise OtherState(f"the outer state of round {state.round} is not on this disk")

    async def publish(self) -> None:
        """Publish the newest outer state if it is hashed. No inner steps may be running."""
        record = self.record
        manifest = self._hashed.get(record)
        if manifest is not None:
            async with self.moving:
                await self._loop.artifacts.publish_state(record, manifest)
            self._hashed.clear()
            self._loop.changed.touch()

    async def begin(self, child: OuterService) -> None:
        """Load the state of an earlier process, or make the state before the first round."""
        known = {state.record: state for state in self._store.states()}
        newest = max((state.round for state in known.values()), default=0)
        since = max(1, newest - ROUNDS_KEPT)
        for envelope in self._store.records(since):
            begins = envelope.digest in known or envelope.expect(RoundRecord).round == since
            with suppress(BadRecord):
                if begins:
                    self._loop.chain.begin_at(envelope)
                else:
                    self._loop.chain.add(envelope)
        self._states = {
            record: state
            for record, state in known.items()
            if self._loop.artifacts.state_folder(*state[:2]) is not None
            and record in self._loop.chain
        }
        position = self._store.position()
        if position in self._states:
            self._hold(self._states[position])
        elif self._states:  # its files were deleted; the records since are merged again
            self._hold(max(self._states.values(), key=lambda state: state.round))
        else:
            folder = self._loop.artifacts.new_state_folder(GENESIS)
            job = FirstState(folder=self._loop.artifacts.local(folder))
            made = await child.first_state(job)
            await self._reach(OuterState(GENESIS, 0, made.digest))
        self.since = self._loop.peer.node.world.now()

    async def _reach(self, state: OuterState) -> None:
        """Make a state the present one; it is durable on return."""
        await self._store.reach(state)
        self._states[state.record] = state
        self._hold(state)
        self.since = self._loop.peer.node.world.now()
        self._loop.changed.touch()

    def _hold(self, state: OuterState) -> None:
        """Make a state the present one, which a fetch never deletes to make room."""
        store = self._loop.peer.store
        store.pin(state_key(*state[:2]))
        if self._held is not None:
            store.unpin(self._held)
        self._held = state_key(*state[:2])
        self._record = state.record

    async def _forget_old(self) -> None:
        """Delete the states that no contribution can begin from any more, and the contributions
        that nobody merges any more, who was not further behind than that."""
        staleness_max = self._loop.peer.run.manifest.outer.staleness_max
        oldest = self.state.round - staleness_max - 1
        old = [record for record, kept in self._states.items() if kept.round < oldest]
        for record in old:
            await self._loop.artifacts.drop_state(*self._states.pop(record)[:2])
        await self._store.drop_states_before(oldest)
        self._loop.chain.forget_before(self.state.round - ROUNDS_KEPT)
        await self._loop.artifacts.drop_before(oldest - staleness_max - 1)

    # --- records -----------------------------------------------------------------------------

    async def hear(self, envelope: Envelope) -> None:
        """Take over a record that arrived; it is durable before anything follows from it."""
        try:
            added = self._loop.chain.add(envelope)
        except BadRecord as error:
            self._events.emit("outer.record_refused", signer=envelope.sender, reason=str(error))
            return
        for link in added:
            self._came[link.digest] = self._loop.peer.node.world.now()
            await self._store.keep_record(link.envelope)
        self._loop.changed.touch()

    def _counts(self, link: Link) -> bool:
        """Whether a record can be the last of the chain that this trainer follows."""
        if self._is_given_up(link.digest):
            return False
        if link.signer not in self._loop.peer.run.manifest.trainer_ids():
            return False
        chain = self._loop.chain
        fork = chain.fork(self.record, link.digest)
        beyond = (chain.path(fork, link.digest) or []) if fork is not None else [link]
        if any(each.digest in self._disowned for each in beyond):
            return False
        peer = self._loop.peer
        deadline = self.since + peer.run.manifest.outer.deadline_seconds
        late = peer.node.world.now() >= deadline
        # What most trainers have followed is followed late, whoever is wrong.
        outdone = late and chain.weight_of(link.digest) > chain.weight_of(self.record)
        return not self.takes_part or not any(
            (not late and self._is_thin(each)) or (not outdone and self._is_unfair(each))
            for each in beyond
            if each.signer != peer.peer_id
        )

    def _is_unfair(self, link: Link) -> bool:
        """Whether a record lists or scores peers that no version of the run admits to that, or
        scores strangers otherwise than all others who scored them; or whether these may be at it.
        """
        peer, record = self._loop.peer, link.record
        outer = peer.run.manifest.outer
        named = [set(manifest_in(each).trainer_ids()) for each in peer.run.versions()]
        listed = {each.trainer for each in record.contributions}
        rated = {each.trainer for each in record.rated}
        scored = {each.trainer for each in record.rated if each.is_scored}
        ever, always = set[str]().union(*named), set(named[-1]).intersection(*named)
        if not listed - rated <= ever or scored & always or link.digest in self._passed_over:
            return True
        if not outer.is_scored or len(listed & rated) > outer.strangers_max:
            return bool(rated)
        said = measured(self._loop, record.parent, link.round)
        others = [each for who, each in said.items() if who != link.signer]
        if len(others) >= SCORERS - 1:
            contradicted = is_contradicted(record, others)
            if contradicted and self.record != record.parent:
                self._passed_over[link.digest] = None
            return contradicted
        told = self._loop.presence.others().items()
        bases = {who: each.contribution.base for who, each in told if each.contribution}
        bases[peer.peer_id] = record.parent
        may = {who for who in self._loop.presence.present() if bases.get(who) == record.parent}
        scorers = {*ranking(tuple(sorted(may)), peer.run.id, link.round)[:SCORERS]} - {link.signer}
        patience = outer.grace_seconds + TAKEOVER_SECONDS
        waits = peer.node.world.now() < self._came.get(link.digest, -math.inf) + patience
        return waits and len(scorers) >= SCORERS - 1

    def _is_thin(self, link: Link) -> bool:
        """Whether a record lists fewer contributions than the quorum, too early, and leaves out a
        trainer that is present on this trainer's own chain.

        Without this rule one trainer could merge only its own contributions, round after round,
        while the others take their inner steps, and all would follow."""
        chain, rated = self._loop.chain, weights(link.record.rated).keys()
        listed = {each.trainer for each in link.record.contributions} - rated
        if len(listed) >= self._loop.peer.run.manifest.outer.quorum:
            return False
        present, others = self._loop.presence.present(), self._loop.presence.others()
        return any(
            chain.ancestor(self.record, others[trainer].round) == others[trainer].record
            for trainer in present
            if trainer in others and trainer not in listed
        )

    def _is_given_up(self, record: bytes) -> bool:
        """Whether the state after a record could not be reached a short while ago."""
        failed = self._failed.get(record)
        if failed is None:
            return False
        if not set(self._loop.presence.present()) - {self._loop.peer.peer_id}:
            return True  # nobody is there whom another attempt could succeed with
        if failed.number < ATTEMPTS_MAX:
            return False
        doublings = min(failed.number - ATTEMPTS_MAX, GIVEN_UP_DOUBLINGS_MAX)
        pause: float = GIVEN_UP_SECONDS * 2**doublings
        return self._loop.peer.node.world.now() < failed.at + pause

    def _target(self) -> bytes:
        """The last record of the heaviest known chain that can be followed."""
        self._loop.chain.trust(self._loop.peer.run.manifest.trainer_ids())
        return self._loop.chain.best(self._counts)

    def _ahead(self) -> tuple[str, OuterStatus] | None:
        """A trainer whose records lead to a state that no record here does, if there is one; of
        several, one of those that most trainers agree with.

        What a status says of its own weight would be a claim, so its records are asked for."""
        others = self._loop.presence.others()
        held = Counter(status.record for status in others.values())
        unknown = [
            (-held[status.record], status.record, trainer)
            for trainer, status in others.items()
            if status.record not in self._loop.chain
            and status.round > self.state.round - ROUNDS_KEPT
            and not self._is_given_up(trainer.encode())
        ]
        if not unknown:
            return None
        trainer = min(unknown)[2]
        return trainer, others[trainer]

    # --- following ---------------------------------------------------------------------------

    async def run(self, child: OuterService) -> None:
        """Keep to the heaviest chain until cancelled. Raises `ChildDied`."""
        while True:
            wanted = b""
            while self._sharing.to_repeat:
                await self._go_back(self._sharing.to_repeat.pop())
            try:
                ahead = self._ahead()
                if ahead is not None:
                    wanted = ahead[0].encode()
                    await self._learn(*ahead)
                    self._failed.pop(wanted, None)
                    continue
                wanted = self._target()
                if wanted != self.record:
                    await self._advance(wanted, child)
                    self._failed.pop(wanted, None)
                    continue
            except ChildDied:
                raise
            except Disowned:  # it is not followed any more
                continue
            except (SwarmError, OSError) as error:
                self._fail(wanted, str(error))
                await trio.sleep(RETRY_SECONDS)
                continue
            before = self._said_lost
            if before is not None and self._loop.chain.path(before, self.record) is None:
                self._said_lost = None
                self._events.emit("outer.branch_left", round=self.state.round)
            with trio.move_on_after(GIVEN_UP_SECONDS):
                await self._loop.changed.wait_change()

    def _disown(self, link: Link, reason: str) -> None:
        """Never follow a record, which states what fewer trainers say than this one does."""
        self._events.emit("outer.record_refused", signer=link.signer, reason=reason)
        self._disowned[link.digest] = None

    def _fail(self, wanted: bytes, reason: str) -> None:
        before = self._failed.get(wanted)
        failed = _Failures(before.number + 1 if before else 1, self._loop.peer.node.world.now())
        self._failed[wanted] = failed
        self._events.emit(
            "outer.behind",
            round=self.state.round,
            reason=reason,
            last=failed.number >= ATTEMPTS_MAX,
        )
        self._loop.changed.touch()

    async def _learn(self, trainer: str, status: OuterStatus) -> None:
        """Ask a trainer for the records that lead to its state."""
        records: list[Envelope] = []
        wanted = status.record
        while wanted not in self._loop.chain and len(records) < ROUNDS_KEPT:
            page = await ask(self._loop.peer, PeerId(trainer), wanted)
            if not page:
                break
            records += page
            wanted = page[-1].expect(RoundRecord).parent
        if not records:
            raise PeerError(f"{trainer} does not hand out the record of its round {status.round}")
        if wanted not in self._loop.chain:
            self._check_company(trainer, {each.digest for each in records})
            for link in self._loop.chain.begin_at(records[-1]):
                await self._store.keep_record(link.envelope)
        for envelope in reversed(records):
            await self.hear(envelope)
        if status.record not in self._loop.chain:
            raise PeerError(f"{trainer} hands out records that do not follow from each other")

    def _check_company(self, trainer: str, records: Collection[bytes]) -> None:
        """Raise `PeerError` unless more than half of the other trainers that are present are where
        a trainer's records lead, which begin somewhere in a chain of which nothing is known here.
        """
        others = self._loop.presence.others()
        present = [each for each in self._loop.presence.present() if each in others]
        agree = sum(others[each].record in records for each in present)
        if self.record != GENESIS and 2 * agree <= len(present):
            raise PeerError(
                f"the records of {trainer} have no beginning that is known here, and only {agree} "
                f"of {len(present)} other trainers agree with them"
            )

    async def _advance(self, target: bytes, child: OuterService) -> None:
        """Go to the state after a record of the chain."""
        fork = self._loop.chain.fork(self.record, target)
        start = await self._nearest_state(target)
        path = self._loop.chain.path(start, target) if start is not None else None
        if fork != self.record and self._said_lost != self.record:
            self._said_lost = self.record
            self._say_lost(target)
        most = self._loop.peer.run.manifest.outer.staleness_max + 1
        if path is None or len(path) > most:
            if await self._recover(target, child):
                return
            if path is None:
                raise PeerError("no trainer offers an outer state of the heaviest chain")
        try:
            for step in path:
                parts = [each.artifact for each in step.record.contributions]
                with self._loop.peer.store.pinned(*parts):  # from the first fetch on
                    await self._merge(step, child)
        except (BadRecord, ChildDied):
            raise
        except SwarmError as error:
            self._events.emit("outer.not_merged", round=step.round, reason=str(error))
            if not await self._recover(target, child):
                raise

    async def _nearest_state(self, target: bytes) -> bytes | None:
        """The newest record of a chain whose state is on this disk."""
        digest = target
        async with self.moving:  # a folder that moves is in neither place
            while digest not in self._states or self.folder(digest) is None:
                link = self._loop.chain.get(digest)
                if link is None:
                    return None
                digest = link.record.parent
        return digest

    def _say_lost(self, target: bytes) -> None:
        """Report what this trainer's branch has merged and the heavier one has not."""
        rounds = lost(self._loop.chain, self.record, target)
        tokens = sum(tokens_in(link.record.contributions) for link in rounds)
        self._lost.update(rounds_lost=len(rounds), tokens_lost=tokens)
        self._events.emit(
            "outer.branch_lost",
            rounds=[link.round for link in rounds],
            tokens=tokens,
            contributions=sum(len(link.record.contributions) for link in rounds),
        )

    def take_lost(self) -> Counter[str]:
        """Rounds and tokens of branches that were lost since this was asked before."""
        found, self._lost = self._lost, Counter()
        return found

    async def _merge(self, link: Link, child: OuterService) -> None:
        """Merge one record's contributions, and go to the state that follows."""
        before = self._states[link.record.parent]
        known_wrong = link.record.state in self._wrong.get(link.record.parent, ())
        if before.digest != link.record.state and not known_wrong:
            # A merge gives everybody the same bits, so somebody computed or says something wrong:
            # what more trainers have is followed. Two alone would wait for each other for ever, so
            # the one that follows the record fetches the state that it names.
            claims = self._claims(before.record)
            ours, theirs = claims[before.digest], claims[link.record.state]
            problem = (
                f"the outer state of round {before.round} differs from the one that {link.signer} "
                f"has signed; {ours} trainers have this one, {theirs} the other"
            )
            if ours > theirs:
                self._disown(link, problem)
                raise Disowned(problem)
            if ours == theirs and len(self._loop.presence.present()) > 2:
                raise BadRecord(problem)  # until the others have merged that round too
            raise OtherState(problem)
        parts: list[Contributed] = []
        shards: list[str] = []
        if self._sharing.count > 1:
            shards = await self._sharing.collect(link, child)
        else:
            parts = await self._sharing.parts(link)
        trainers = [part.trainer for part in link.record.contributions]
        begun, outer = self._loop.peer.node.world.now(), self._loop.peer.run.manifest.outer
        artifacts = self._loop.artifacts
        async with self.moving:
            state = self.folder(link.record.parent)
            assert state is not None
            job = MergeRound(
                state=artifacts.local(state),
                contributions=parts,
                momentum=outer.momentum,
                learning_rate=outer.learning_rate,
                folder=artifacts.local(artifacts.new_state_folder(link.digest)),
                strangers_share=outer.strangers_share,
                shards=shards,
            )
            merged = await child.merge(job)
        await self._reach(OuterState(link.digest, link.round, merged.digest))
        self._events.emit(
            "outer.merged",
            round=link.round,
            record=link.digest,
            trainers=trainers,
            left_out=[each.trainer for each in merged.left_out],
            shortened=merged.shortened,
            tokens=link.record.tokens,
            state=merged.digest,
            seconds=self._loop.peer.node.world.now() - begun,
        )
        for each in merged.left_out:
            self._events.emit(
                "outer.contribution_refused",
                trainer=each.trainer,
                base_round=link.round - 1,
                reason=each.problem,
            )
        await self._forget_old()

    async def _go_back(self, record: bytes) -> None:
        """Forget the outer states since a record that was merged with a wrong shard: they are made
        again from the state before, if that is still here."""
        chain = self._loop.chain
        link = chain.get(record)
        doomed = [each for each in self._states if chain.path(record, each) is not None]
        if link is None or not doomed or self.folder(link.record.parent) is None:
            return
        async with self.moving:
            await self._reach(self._states[link.record.parent])
            for each in doomed:
                state = self._states.pop(each)
                self._wrong.of(each, set).add(state.digest)
                self._hashed.pop(each, None)
                await self._loop.artifacts.drop_state(*state[:2])
        self._events.emit("outer.repeated", round=link.round)

    async def _recover(self, target: bytes, child: OuterService) -> bool:
        """Fetch the newest outer state on the way to a record that another trainer offers.

        Returns False if nobody offers a newer one than this trainer holds there."""
        nearest = await self._nearest_state(target)
        offers = [
            offer
            for trainer, status in self._loop.presence.others().items()
            if (offer := self._offer(trainer, status, target)) is not None
            and (nearest is None or offer.state.round > self._loop.chain.round_of(nearest))
        ]
        if not offers:
            return False
        offer = max(offers, key=lambda each: (each.state.round, each.trainer))
        begun = self._loop.peer.node.world.now()
        name = f"the outer state after round {offer.state.round}"
        folder = await self._loop.artifacts.fetch(offer.reference, name)
        job = CheckState(folder=self._loop.artifacts.local(folder))
        checked = await child.check_state(job)
        if checked.problem or checked.digest != offer.state.digest:
            await self._loop.artifacts.drop_state(*offer.state[:2])
            raise BadManifest(
                f"the outer state that {offer.trainer} offers cannot be used: "
                f"{checked.problem or 'its digest is not the one that was signed'}"
            )
        await self._reach(offer.state)
        self._events.emit(
            "outer.recovered",
            round=offer.state.round,
            trainer=offer.trainer,
            seconds=self._loop.peer.node.world.now() - begun,
        )
        await self._forget_old()
        return True

    def _claims(self, record: bytes) -> Counter[bytes]:
        """How many trainers say that a record leads to each of several states: by their status, or
        by a record that they have signed after it."""
        said = {
            link.signer: link.record.state
            for link in self._loop.chain.children(record)
            if link.signer in self._loop.peer.run.manifest.trainer_ids()
        }
        for trainer, status in self._loop.presence.others().items():
            if status.record == record:
                said[trainer] = status.state
        if record in self._states:
            said[self._loop.peer.peer_id] = self._states[record].digest
        return Counter(said.values())

    def _offer(self, trainer: str, status: OuterStatus, target: bytes) -> _Offer | None:
        """The outer state that a trainer offers, if it is on the way to a record."""
        reference = status.published
        if reference is None or self._loop.chain.path(status.record, target) is None:
            return None
        record = self._loop.chain.ancestor(status.record, reference.lineage)
        if record is None or state_key(record, reference.lineage) != (
            reference.lineage,
            reference.step,
        ):
            return None
        since = self._loop.chain.path(record, status.record)
        digest = since[0].record.state if since else status.state
        claims = self._claims(record)
        if claims[digest] < max(claims.values(), default=0):
            return None
        return _Offer(trainer, OuterState(record, reference.lineage, digest), reference)
