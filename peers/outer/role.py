"""The replica role: train with other trainers of the run, which come and go.

Five tasks run concurrently. One takes inner steps and publishes a contribution from each outer
state. One fetches and checks the contributions of others. One closes the round when it is this
trainer's turn. One follows the heaviest chain of records by merging what they list. One announces
this trainer's status. They share `Following`, the position in the chain.

Everything is durable before it is announced, and each job of the child is a function of files. So a
trainer that is killed at any instant repeats what it had not announced, with the same result."""

import math
from contextlib import suppress
from typing import Any, ClassVar

import trio
from msgspec.structs import replace

from peers.engines.doctor import compute_findings
from peers.models.find import find_model
from peers.outer.artifacts import FOLDER, Artifacts
from peers.outer.chain import Chain, tokens_in
from peers.outer.following import Following
from peers.outer.gathering import Gathered, Gathering, ranking
from peers.outer.presence import (
    STATUS_GAP_SECONDS,
    STATUS_LIFETIME_SECONDS,
    STATUS_SECONDS,
    OuterLoop,
    Presence,
    serve_records,
)
from peers.outer.rating import assignment, weights
from peers.outer.settings import ReplicaSettings
from peers.outer.sharing import Sharing
from peers.outer.store import OuterState, OuterStore, Own
from peers.outer.strangers import LATE_SHARE, Strangers, keep_offering
from swarm.errors import UserError
from swarm.gossip.topics import RUN, WORK
from swarm.jobs import outer as jobs
from swarm.jobs.training import Figures
from swarm.ledger.entries import CheckpointPublished, RoundFigures
from swarm.node.run_node import RunNode
from swarm.run.findings import Finding, Work
from swarm.settings import PeerSettings
from swarm.wire.envelope import STATE_LIFETIME_SECONDS, Envelope
from swarm.wire.manifest import Outer
from swarm.wire.outer import Contribution, OuterStatus, Rated, RoundRecord, Stage
from swarm.world import client
from swarm.world.observable import STARVED_SECONDS, Observable
from swarm.world.restarts import Restarts
from swarm.world.tasks import open_guarded

SERVICE = "peers.outer.learning.service:open_service"
START_DEADLINE_SECONDS = 600.0
"""Time for the child to import torch."""

MEETING_SECONDS = 15.0
"""Time that a trainer waits at its start for the status of another trainer."""

NEWS_SECONDS = 0.004
"""Statuses are looked at together that arrive within as long for each trainer of the run: of 60
there are dozens a second while a round is merged, and each is a reason to look at all others."""

RECORDS_WAITING_MAX = 1000
"""Records from gossip that wait to be stored."""

ENTRIES_WAITING_MAX = 100
"""Entries that wait until this peer's log is complete; further ones are left out of it."""

FAREWELL_SECONDS = 120.0
"""Longest time that a trainer which has finished the run stays for the others to fetch from it."""


class ReplicaRole:
    """Trains as one of several. Must run on a peer whose key the manifest names as a trainer, or,
    in a scored run, as a stranger, which contributes, and neither signs nor is waited for.

    Its settings are those of `peers.outer.settings`."""

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)
    Settings: ClassVar[type[ReplicaSettings]] = ReplicaSettings

    @staticmethod
    def check(settings: PeerSettings) -> None:
        """Fetch a model that has a name."""
        own = settings.of("replica", ReplicaSettings)
        settings.tables["replica"]["model"] = str(find_model(own.model, "replica.model").folder)

    @staticmethod
    async def doctor(settings: PeerSettings, work: Work | None, model: str | None) -> list[Finding]:
        """See `swarm.roles.Role`."""
        own = settings.of("replica", ReplicaSettings)
        return await compute_findings(own, work, interpreter=own.interpreter or None)

    rank_module: ClassVar[str] = "peers.outer.follower"

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._node = peer.node
        self._run = peer.run
        self._events = peer.node.events
        self._settings = peer.node.settings.of("replica", ReplicaSettings)
        named = self._run.manifest.trainer_ids()
        self._is_stranger = self._outer.is_scored and peer.peer_id not in named
        self._trusted = None if self._is_stranger else peer.trusted_part("replica")
        if not self._outer.rounds:
            raise UserError(
                f"outer.rounds of run {self._run.id} is 0, so it has no outer loop; its owner "
                "must set the number of rounds under [outer], or this peer be a trainer instead"
            )
        problem = self._outer.problem()
        if problem is not None:
            raise UserError(f"run {self._run.id}: {problem}")
        step_tokens = self._settings.batch_sequences * self._settings.sequence_tokens
        if step_tokens > self._outer.step_tokens_max:
            raise UserError(
                f"replica.batch_sequences times replica.sequence_tokens is {step_tokens}; run "
                f"{self._run.id} allows {self._outer.step_tokens_max} (outer.step_tokens_max): "
                "choose a smaller batch"
            )
        self._store = OuterStore(peer.node.disk.database("outer.sqlite"))
        self._loop = OuterLoop(
            peer=peer,
            chain=Chain(self._outer.staleness_max, self._outer.contribution_tokens_max),
            presence=Presence(peer),
            artifacts=Artifacts(peer),
            changed=Observable(None),
        )
        self._sharing = Sharing(self._loop)
        self._gathering = Gathering(self._loop, self._sharing)
        self._following = Following(self._loop, self._store, self._sharing)
        self._strangers = Strangers(self._loop, self._gathering, self._following)
        self._restarts = Restarts(self._events, "replica")
        self._own: Own | None = None
        """This trainer's newest contribution."""
        self._seconds_made = 0.0
        """How long the last contribution took."""
        self._begun_made = 0.0
        """When its inner steps began."""
        self._moved = (0, 0)
        """Bytes that this process had sent and received then."""
        self._bases: set[bytes] = set()
        """Records from whose outer states this trainer has contributed."""
        self._begun = b""
        """The record that the last inner steps began from."""
        self._said_join = ("", 0)
        """What was reported last of a join, and of which round."""
        self._alone: bool | None = None
        """Whether no other trainer was present when this was reported last."""
        self._leaving = False
        self._news = trio.Event()
        """Set by a status that has news."""
        self._received, self._records = trio.open_memory_channel[Envelope](RECORDS_WAITING_MAX)
        """Records from gossip, which only trainers may send."""
        self._told, self._entries = trio.open_memory_channel[CheckpointPublished](
            ENTRIES_WAITING_MAX
        )
        peer.gossip.listen(OuterStatus, self._on_status)
        peer.gossip.listen(RoundRecord, self._on_record)

    @property
    def _outer(self) -> Outer:
        return self._run.manifest.outer

    def _on_status(self, envelope: Envelope) -> None:
        if self._loop.presence.hear(envelope):
            if envelope.sender != self._peer.peer_id and self._run.trusts(envelope.sender):
                self._sharing.hear(envelope.sender, envelope.expect(OuterStatus))
            self._news.set()

    async def _pass_on_news(self) -> None:
        while True:
            await self._news.wait()
            self._news = trio.Event()
            self._loop.changed.touch()
            await trio.sleep(NEWS_SECONDS * len(self._run.manifest.trainers))

    def _on_record(self, envelope: Envelope) -> None:
        with suppress(trio.WouldBlock):  # one too many is asked for when a status names it
            self._received.send_nowait(envelope)

    async def leave(self) -> None:
        """Tell the others not to wait for this trainer."""
        self._leaving = True
        if not self._is_stranger:
            await self._announce_status()

    async def run(self) -> None:
        """Train until every round of the run is done."""
        await self._store.open()
        serve_records(self._peer, self._loop.chain, self._answers)
        await self._restarts.run(self._live)

    def _answers(self, peer: str) -> bool:
        admits = self._outer.is_scored and self._trusted is not None and self._trusted.admits(peer)
        return admits or self._run.trusts(peer)

    async def _live(self) -> None:
        async with self._node.compute.child(
            SERVICE,
            jobs.OuterSetup(hardware=self._settings.hardware),
            name="replica",
            interpreter=self._settings.interpreter or None,
            start_deadline_seconds=START_DEADLINE_SECONDS,
        ) as process:
            child = client(jobs.OuterService, process)
            self._peer.status.doing = "loading"
            own = self._store.own()
            started = await child.start(self._start())
            if started.plan is not None:
                self._settings.take(started.plan, self._events)
            await self._following.begin(child)
            self._own = own[-1] if own else None
            self._bases = {each.contribution.base for each in own}
            await self._clear_leftovers()
            if self._own is not None and self._loop.artifacts.folder(
                self._own.contribution.artifact
            ):
                self._gathering.add(self._own.contribution)
            most = self._sharing.bytes_max = started.contribution_bytes_max
            async with open_guarded() as tasks:
                head, behind = self._head, self._following.is_behind
                tasks.start_soon(self._hear_records)
                tasks.start_soon(self._pass_on_news)
                if self._is_stranger:
                    tasks.start_soon(lambda: keep_offering(self._loop, lambda: self._own))
                else:
                    tasks.start_soon(self._keep_log)
                    tasks.start_soon(lambda: self._gathering.run(head, behind, child, most))
                    tasks.start_soon(self._keep_announcing)
                await self._meet()
                tasks.start_soon(lambda: self._following.run(child))
                if not self._is_stranger:
                    tasks.start_soon(self._following.hash_states)
                    if self._outer.shards > 1:
                        tasks.start_soon(lambda: self._sharing.check(child))
                    tasks.start_soon(self._close_rounds)
                    tasks.start_soon(self._report_waiting)
                    if self._outer.is_scored:
                        tasks.start_soon(lambda: self._strangers.run(child, most))
                await tasks.guard(lambda: self._train(child))
                tasks.nursery.cancel_scope.cancel()

    def _start(self) -> jobs.StartReplica:
        manifest, settings = self._run.manifest, self._settings
        return settings.filled(
            jobs.StartReplica,
            trainer=self._peer.peer_id,
            inner=settings.inner(manifest.optimiser),
            inner_steps=self._outer.inner_steps,
            rounds=self._outer.rounds,
            trainers=() if self._is_stranger else tuple(manifest.trainer_ids()),
            compression=self._outer.compression,
            shards=self._outer.shards,
            sharding=settings.sharding,
            run=f"{self._run.id}-{self._peer.peer_id[-6:]}",
            folder=self._loop.artifacts.local(FOLDER),
        )

    async def _clear_leftovers(self) -> None:
        """Delete what a killed process left in `outer/` and no job would write again."""
        kept = self._following.folders()
        if self._own is not None:
            kept.add(_inner(self._own.number))
        disk = self._node.disk
        for name in disk.list(FOLDER):
            folder = f"{FOLDER}/{name}"
            if name.startswith(("inner-", "state-", "shard-")) and folder not in kept:
                await disk.remove(folder)

    def _head(self) -> bytes:
        return self._following.record

    async def _hear_records(self) -> None:
        async for envelope in self._records:
            await self._following.hear(envelope)

    async def _meet(self) -> None:
        """Wait a while for another trainer, so that a newcomer begins from the newest state."""
        self._peer.status.doing = "looking for the other trainers"
        with trio.move_on_after(MEETING_SECONDS):
            while not self._loop.presence.others() and len(self._run.manifest.trainer_ids()) > 1:
                await self._loop.changed.wait_change()

    # --- training ----------------------------------------------------------------------------

    async def _train(self, child: jobs.OuterService) -> None:
        """Contribute to every round that this trainer reaches, until the last one is merged."""
        while self._following.state.round < self._outer.rounds:
            base = self._following.state
            if self._following.is_behind() or base.record in self._bases:
                self._peer.status.doing = f"waiting for round {base.round + 1}"
                await self._loop.changed.wait_change()
                continue
            wait = self._wait_to_begin(base)
            if wait > 0:
                with trio.move_on_after(min(wait, self._loop.presence.gone_in())):
                    await self._loop.changed.wait_change()
                continue
            self._following.takes_part = True
            self._begun = base.record
            self._loop.changed.touch()
            self._peer.status.step = base.round + 1
            self._peer.status.doing = f"round {base.round + 1}: inner steps"
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._cancel_when_useless, base.record, scope)
                    await self._contribute(child)
                    nursery.cancel_scope.cancel()
            if scope.cancelled_caught:
                self._events.emit("outer.round_abandoned", round=base.round + 1)
        await child.end()
        await self._finish(child)

    def _wait_to_begin(self, base: OuterState) -> float:
        """Seconds to wait before the inner steps from a state; more than 0 only if joins block, or
        for a stranger whose contribution would come too late, since it counts in no other round.

        A newcomer begins with a round that nobody has begun yet, or whose deadline has passed: who
        began it may hang. Who takes part waits for the newcomers until they hold the outer state,
        `join_seconds` at most."""
        round, presence = base.round + 1, self._loop.presence
        age = self._node.world.now() - self._following.since
        left = self._outer.deadline_seconds - age
        if self._is_stranger and age > self._outer.grace_seconds * LATE_SHARE and left > 0:
            self._peer.status.doing = f"waiting for round {round + 1}: too late for this one"
            return left
        if self._outer.join == "free":
            return 0.0
        is_new = not self._following.takes_part
        if is_new and left > 0 and base.record in presence.at("training").values():
            self._peer.status.doing = f"joins with round {round + 1}"
            self._say_join("joining", round)
            return left
        self._following.takes_part = True
        waits_for = [who for who, at in presence.at("joining").items() if at != base.record]
        left = self._following.since + self._outer.join_seconds - self._node.world.now()
        if not waits_for:
            return 0.0
        names = ", ".join(trainer[-6:] for trainer in waits_for)
        self._peer.status.doing = (
            f"round {round} waits at most {self._outer.join_seconds:.0f} s for {names} to join"
        )
        what = "join_awaited" if left > 0 else "join_missed"
        self._say_join(what, round, trainers=waits_for, seconds=self._outer.join_seconds)
        return left

    def _say_join(self, what: str, round: int, **fields: object) -> None:
        if self._said_join != (what, round):
            self._said_join = (what, round)
            self._events.emit(f"outer.{what}", round=round, **fields)
            self._loop.changed.touch()

    async def _cancel_when_useless(self, base: bytes, scope: trio.CancelScope) -> None:
        """Cancel inner steps whose contribution could not count any more."""
        round = self._loop.chain.round_of(base)
        while True:
            head = self._following.state
            if (
                head.round >= self._outer.rounds
                or head.round - round > self._outer.staleness_max
                or self._loop.chain.ancestor(head.record, round) != base
            ):
                scope.cancel()
                return
            await self._loop.changed.wait_change()

    async def _contribute(self, child: jobs.OuterService) -> None:
        """Take the inner steps from the present state, and publish the pseudo-gradient."""
        base = self._following.state
        state = self._following.folder(base.record)
        assert state is not None
        local = self._loop.artifacts.local
        known = self._known(base)
        mine = assignment(self._run.id, base.round + 1, base.record, self._peer.peer_id)
        if self._settings.validation_sequences:
            loss = await child.measure(jobs.MeasureState(state=local(state)))
            if loss is not None:
                self._events.emit("outer.measured", round=base.round, loss=loss)
                known["validation_loss"] = loss
        before = self._own
        number = before.number + 1 if before is not None else 1
        begun, status = self._node.world.now(), self._peer.status
        folder = f"{FOLDER}/contribution-{number}"
        status.begins(begun, self._seconds_made)
        try:
            job = jobs.TrainRound(
                round=base.round + 1,
                state=local(state),
                inner_before=local(_inner(before.number)) if before is not None else "",
                inner_after=local(_inner(number)),
                contribution=local(folder),
                known=known,
                seed=mine if self._is_stranger else None,
            )
            trained = await child.train(job)
        finally:
            status.idle_since = self._node.world.now()
        with trio.CancelScope(shield=True):  # it is made, and takes no long work any more
            figures = {**known, **trained.figures}
            await self._publish(folder, number, base, trained.tokens, begun, figures)
            if before is not None:
                await self._node.disk.remove(_inner(before.number))
        seconds = self._seconds_made = self._node.world.now() - begun
        self._begun_made = begun
        status.tokens_per_second = trained.tokens / seconds if seconds else 0.0
        await self._following.publish()

    def _known(self, base: OuterState) -> Figures:
        """What is known of a state as the inner steps from it begin, for the curves."""
        traffic, (sent, received) = self._node.transport.traffic, self._moved
        self._moved = (traffic.sent, traffic.received)
        known: Figures = {
            "trainers_present": len(self._loop.presence.present()),
            "tokens_merged": self._loop.chain.tokens_of(base.record),
            "bytes_sent": traffic.sent - sent,
            "bytes_received": traffic.received - received,
        }
        link = self._loop.chain.get(base.record)
        if link is not None:
            known["trainers_merged"] = len(link.record.contributions)
        if self._seconds_made:
            seconds = self._node.world.now() - self._begun_made
            known["utilisation"] = self._seconds_made / seconds
        return known

    async def _publish(
        self,
        folder: str,
        number: int,
        base: OuterState,
        tokens: int,
        begun: float,
        figures: Figures,
    ) -> None:
        """Publish a contribution that is durable in a folder."""
        held = await self._loop.artifacts.publish_contribution(folder, base.record, base.round)
        own = Own(
            number,
            Contribution(
                trainer=self._peer.peer_id,
                base=base.record,
                base_round=base.round,
                artifact=held.reference,
                total_bytes=held.manifest.total_bytes,
                tokens=tokens,
            ).signed(self._node.identity, self._run.id),
        )
        await self._store.keep_own(own)
        self._own = own
        self._bases.add(base.record)
        self._restarts.succeeded()
        self._events.emit(
            "outer.contributed",
            round=base.round + 1,
            tokens=tokens,
            bytes=held.manifest.total_bytes,
            seconds=self._node.world.now() - begun,
            figures=figures,
        )
        self._gathering.add(own.contribution)
        names = set(RoundFigures.__struct_fields__) & figures.keys()
        told: dict[str, Any] = {
            name: figures[name] for name in names if math.isfinite(figures[name])
        }
        entry = CheckpointPublished(
            lineage=base.round,
            step=held.reference.step,
            manifest=held.reference.digest,
            round=RoundFigures(**told, **self._following.take_lost()),
        )
        with suppress(trio.WouldBlock):
            self._told.send_nowait(entry)

    async def _keep_log(self) -> None:
        """Append entries to the log, which may have to wait for the others' copies of it."""
        async for entry in self._entries:
            assert self._trusted is not None
            await self._trusted.append([entry])

    async def _finish(self, child: jobs.OuterService) -> None:
        """Export the last outer state once the others have it, too, or after a while.

        Two trainers may have signed a record of the last round: until all hold the same state, a
        heavier chain is followed."""
        self._peer.status.doing = "all rounds are merged; waits until the others have them, too"
        with trio.move_on_after(FAREWELL_SECONDS):
            await self._following.publish()
            while self._following.is_behind() or self._others_differ():
                with trio.move_on_after(self._loop.presence.gone_in()):
                    await self._loop.changed.wait_change()
        state = self._following.state
        folder = f"{FOLDER}/model-{state.round}"
        source = self._following.folder(state.record)
        assert source is not None
        local = self._loop.artifacts.local
        await child.export_state(jobs.ExportState(state=local(source), folder=local(folder)))
        self._events.emit(
            "outer.run_complete", round=state.round, state=state.digest, folder=folder
        )
        self._peer.status.doing = "the run is complete"
        if not self._is_stranger and (link := self._loop.chain.get(state.record)):
            with trio.move_on_after(FAREWELL_SECONDS):
                # Strangers do not say how far they are.
                while link.record.rated or self._strangers.offers:
                    await self._loop.changed.wait_change()

    def _others_differ(self) -> bool:
        """Whether another trainer that is present does not hold this trainer's state."""
        others, present = self._loop.presence.others(), self._loop.presence.present()
        return any(
            status.record != self._following.record
            for trainer, status in others.items()
            if trainer in present
        )

    # --- closing rounds ----------------------------------------------------------------------

    def _gathered(self) -> tuple[Gathered, list[Contribution]]:
        """What this trainer could sign now, after its present state."""
        head = self._following.record
        ready = self._gathering.ready(head)
        present = set(self._loop.presence.present()) - self._loop.presence.at("joining").keys()
        if self._stage() == "joining":
            present.remove(self._peer.peer_id)
        found = Gathered(
            {trainer: at for trainer, (each, at) in ready.items() if each.base == head},
            present,
            self._following.since,
        )
        return found, [contribution for contribution, _ in ready.values()]

    async def _close_rounds(self) -> None:
        """Sign the record of each round that nobody ranked before this trainer has closed."""
        while True:
            state = self._following.state
            self._report_company()
            if state.round >= self._outer.rounds or self._following.is_behind():
                await self._loop.changed.wait_change()
                continue
            gathered, contributions = self._gathered()
            trainers = tuple(self._run.manifest.trainer_ids())
            ranked = ranking(trainers, self._run.id, state.round + 1)
            at = gathered.closes_at(self._outer, ranked, self._peer.peer_id)
            if self._outer.is_scored:
                at += self._strangers.wait_seconds()
            if at > self._node.world.now():
                wait = min(at - self._node.world.now(), self._loop.presence.gone_in())
                with trio.move_on_after(wait):
                    await self._loop.changed.wait_change()
                continue
            await self._close(contributions, gathered)

    async def _close(self, contributions: list[Contribution], gathered: Gathered) -> None:
        """Sign the next record; it is durable before it is announced."""
        state = self._following.state
        rated: list[Rated] = []
        if self._outer.is_scored:
            rated, counted = self._strangers.rated()
            # The owner may have named a peer whose record as a stranger is not forgotten yet.
            parts = weights(rated)
            contributions = [each for each in contributions if parts.get(each.trainer, 1.0)]
            if all(each.trainer in parts for each in contributions):
                await self._loop.changed.wait_change()
                return
            contributions = sorted([*contributions, *counted], key=lambda each: each.trainer)
        record = RoundRecord(
            round=state.round + 1,
            parent=state.record,
            state=state.digest,
            contributions=contributions,
            tokens=self._loop.chain.tokens_of(state.record) + tokens_in(contributions),
            rated=rated,
        )
        envelope = await self._peer.seal(record, STATE_LIFETIME_SECONDS)
        if self._following.record != state.record or self._following.is_behind():
            return  # another trainer's record arrived meanwhile
        self._events.emit(
            "outer.round_closed",
            round=record.round,
            contributions=len(contributions),
            missing=gathered.missing(),
            quorum=gathered.quorum(self._outer),
        )
        await self._following.hear(envelope)
        assert envelope.digest in self._loop.chain, "this trainer's own record breaks a rule"
        self._peer.gossip.publish(envelope)

    def _report_company(self) -> None:
        """Say when this trainer becomes alone, and when it no longer is."""
        alone = self._loop.presence.present() == [self._peer.peer_id]
        if alone != self._alone:
            self._alone = alone
            self._events.emit("outer.alone" if alone else "outer.together", round=self._round())

    def _round(self) -> int:
        return self._following.state.round + 1

    async def _report_waiting(self) -> None:
        """Say regularly for whom a round waits that this trainer has contributed to."""
        while True:
            waited_for = self._round()
            await trio.sleep(STARVED_SECONDS)
            state = self._following.state
            gathered, contributions = self._gathered()
            waits = state.record in self._bases and state.round < self._outer.rounds
            if waits and waited_for == state.round + 1:
                due = gathered.due_at(self._outer) - self._node.world.now()
                self._events.emit(
                    "outer.waiting",
                    round=state.round + 1,
                    contributions=len(contributions),
                    quorum=gathered.quorum(self._outer),
                    waiting_for=gathered.missing(),
                    seconds=self._node.world.now() - self._following.since,
                    seconds_left=max(0.0, due),
                )

    # --- announcing --------------------------------------------------------------------------

    async def _keep_announcing(self) -> None:
        """Announce this trainer's status at each change and every `STATUS_SECONDS`. The shards that
        it holds change with every contribution, so these news wait for each other."""
        while True:
            announced = await self._announce_status()
            told_at = self._node.world.now()
            apart = STATUS_GAP_SECONDS * max(1, len(self._run.manifest.trainers) / 8)
            with trio.move_on_after(STATUS_SECONDS):
                while (status := self._status()) == announced:
                    await self._loop.changed.wait_change()
                while replace(status, held=announced.held) == announced:
                    # Not before the last one that is on its way, or there is one for each.
                    pause = apart if self._gathering.is_fetching else STATUS_GAP_SECONDS
                    with trio.move_on_at(told_at + pause) as scope:
                        await self._loop.changed.wait_change()
                    if scope.cancelled_caught:
                        break
                    status = self._status()

    async def _announce_status(self) -> OuterStatus:
        status = self._status()
        await self._peer.announce(status, STATUS_LIFETIME_SECONDS)
        return status

    def _status(self) -> OuterStatus:
        state = self._following.state
        own = self._own
        return OuterStatus(
            round=state.round,
            record=state.record,
            tokens=self._loop.chain.tokens_of(state.record),
            state=state.digest,
            published=self._following.published(),
            contribution=own.contribution if own is not None else None,
            leaving=self._leaving,
            stage=self._stage(),
            measured_from=self._loop.presence.own[0],
            measured=self._loop.presence.own[1],
            **self._sharing.status(),
        )

    def _stage(self) -> Stage:
        if self._outer.join == "blocking" and not self._following.takes_part:
            return "joining"
        begun = self._following.record in {self._begun, *self._bases}
        return "training" if begun or self._outer.join == "free" else "waiting"


def _inner(number: int) -> str:
    """Folder of this trainer's inner state after a contribution."""
    return f"{FOLDER}/inner-{number}"
