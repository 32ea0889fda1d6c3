"""A node inside one run: the interface that its roles use (`swarm.roles`)."""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal

import trio

from swarm.errors import UserError, leaf_errors
from swarm.events import Rationed
from swarm.gossip.gossip import Gossip
from swarm.gossip.slots import NEIGHBOURS_WANTED
from swarm.gossip.topics import RUN
from swarm.node.evictions import Evictions
from swarm.node.named import NamedRoles
from swarm.node.neighbours import Neighbours
from swarm.node.node import Node
from swarm.node.policies import Announced, Policies
from swarm.node.states import States
from swarm.node.status import Status
from swarm.node.trusted import TrustedPart
from swarm.node.versions import Versions
from swarm.run.admission import ADMISSION_LEASE_SECONDS, NotAdmitted, admits
from swarm.run.clock import TrustedClock
from swarm.run.invites import check_token
from swarm.run.lease import LeaseKeeper
from swarm.run.participant import Participant
from swarm.run.run import Run
from swarm.shardcast.service import BlobService
from swarm.shardcast.store import CheckpointStore
from swarm.shardcast.uploads import Uploads
from swarm.transport import Reachability
from swarm.version import __version__
from swarm.wire import messages
from swarm.wire.envelope import Dropped, Envelope, Gate
from swarm.wire.identity import PeerId
from swarm.wire.manifest import RunManifest
from swarm.wire.messenger import Messenger
from swarm.wire.protocol import PROTOCOL_VERSION
from swarm.world.observable import Observable

CREDENTIAL_SECONDS = ADMISSION_LEASE_SECONDS / 2 - 5.0
"""Shortest time between two credentials shown to bulk servers. An admission is renewed every 10 s,
so the one shown is valid for half of its lifetime at least."""


class RunNode:
    """A node inside one run: gate, gossip, messenger, membership, checkpoints."""

    def __init__(self, node: Node, run: Run, topics: Sequence[str] = (RUN,)) -> None:
        self.node = node
        self.run = run
        self.status = Status()
        self.checkpoint: Observable[Envelope | None] = Observable(None)
        """Newest checkpoint announced by a trainer of the run."""
        self.order: Observable[Envelope | None] = Observable(None)
        """Newest step order."""
        self.evaluation: Observable[Envelope | None] = Observable(None)
        """Newest result on held-out tasks."""
        self._neighbours = Neighbours(node, run)
        self.gossip, self.messenger = self._lines(topics)
        self.versions = Versions(node, run, self.gossip)
        self._evictions = Evictions(node, run, self.gossip)
        self.announced = Announced(node, run)
        self.gossip.listen(RunManifest, self._follow_manifest)
        self.gossip.listen(messages.Checkpoint, self._on_checkpoint)
        self.gossip.listen(messages.StepOrder, self._on_order)
        self.gossip.listen(messages.Evaluation, self._on_evaluation)
        self.store = CheckpointStore(node.disk, run.id, node.events, keep=run.checkpoints_kept)
        self.uploads = Uploads(node.world, node.transport, self.store)
        self.policies = Policies(
            node,
            run,
            neighbours=self._neighbours,
            store=self.store,
            uploads=self.uploads,
            checkpoint=self.checkpoint,
            status=self.status,
        )
        self.blobs = BlobService(self.admits, store=self.store, uploads=self.uploads)
        self.states = States(node, run, self.policies, self.blobs)
        self._repeated_steps = 0
        self._served = self.serves
        node.dht.serving = self.serves
        self._vouch_for_trusted()
        self._granted: Envelope | None = None
        """The newest admission."""
        self._credential_at = -math.inf
        """When bulk servers were last shown a newer one."""
        self._leaving: Literal["", "left", "finished"] = ""
        self._named = NamedRoles(run, node.peer_id)
        self.lease: LeaseKeeper | None = None
        self._trusted: TrustedPart | None = None
        if node.peer_id in run.manifest.trusted_ids():
            node.transport.keep_many()
            self._trusted = TrustedPart(
                node,
                self._participant(),
                newest=self.newest,
                evaluation=lambda: self.evaluation.value,
                has_work=self._has_work,
            )
        else:
            self.lease = LeaseKeeper(
                self._participant(),
                reach=node.reach,
                granted=self._on_granted,
                invite=check_token(node.settings.invite, run),
            )

    def _lines(self, topics: Sequence[str]) -> tuple[Gossip, Messenger]:
        """How signed messages come and go, by gossip and from peer to peer, through one gate."""
        node, run = self.node, self.run
        clock = TrustedClock(run, node.world, node.events, node.peer_id)
        floods = Rationed(node.events)
        gate = Gate(
            node.world,
            run.id,
            partial(node.permits, run),
            run.trusts,
            run.clock_off,
            flooded=lambda sender: floods.emit("membership.trusted_over_rate", remote=sender),
            outgrown=lambda newer: self.versions.on_outgrown(newer),
        )
        gossip = Gossip(
            node.transport,
            gate,
            node.events,
            topics,
            records=self._neighbours.some_records,
            learn_record=node.learn_record,
            admits=lambda peer, shown: admits(run, peer, shown, node.world.wall_time()),
        )
        gossip.compare_clock = clock.compare
        gossip.listen(messages.Presence, clock.on_presence)
        return gossip, Messenger(node.transport, gate, node.events)

    def _participant(self) -> Participant:
        node = self.node
        return Participant(
            node.peer_id,
            self.run,
            node.world,
            node.events,
            self.gossip,
            self.messenger,
            self.seal,
            self.describe,
        )

    @property
    def peer_id(self) -> PeerId:
        return self.node.peer_id

    def keep_for_repeating(self, steps: int) -> None:
        """Keep the policies that rollouts of the last `steps` steps may come from, if the run
        keeps fewer: this peer repeats these steps after a crash."""
        self._repeated_steps = steps
        self._keep_policies()

    def _keep_policies(self) -> None:
        run = self.run
        self.store.keep = max(run.checkpoints_kept, run.max_staleness + self._repeated_steps)

    def trusted_part(self, role: str) -> TrustedPart:
        """Return the log and the other state that this peer's trusted roles share.

        Raises `UserError` if the manifest does not name this peer for `role`, one of
        `swarm.run.admission.TRUSTED_ROLES`."""
        self._named.take(role)
        assert self._trusted is not None, "take_part asks for it before another version comes"
        return self._trusted

    async def _keep_trust(self) -> None:
        while True:
            self._named.check()
            await self.versions.changed.wait_change()

    async def seal(self, message: messages.Message, lifetime_seconds: float) -> Envelope:
        """Sign a message of this run."""
        return await self.node.seal(message, lifetime_seconds, self.run.id)

    def say_starved(self, role: str, seconds: float, reason: str, waiting_for: list[str]) -> None:
        """Report that a role has had no work, for how long, why, and which peers it waits for."""
        connected = self.node.transport.connected()
        self.node.events.emit(
            f"{role}.starved",
            seconds=seconds,
            reason=reason,
            waiting_for=waiting_for,
            not_connected=[peer for peer in waiting_for if peer not in connected],
        )

    async def announce(self, message: messages.Message, lifetime_seconds: float) -> Envelope:
        """Sign a message and gossip it."""
        envelope = await self.seal(message, lifetime_seconds)
        self.gossip.publish(envelope)
        return envelope

    def describe(self) -> messages.Heartbeat:
        """Make this peer's current heartbeat."""
        moved = self.node.transport.traffic
        return messages.Heartbeat(
            roles=self.node.settings.role,
            policy=self.status.policy,
            step=self.status.step,
            doing=self.status.doing[: messages.DOING_CHARACTERS_MAX],
            tokens_per_second=self.status.rate(self.node.world.now()),
            bytes_sent=moved.sent,
            bytes_received=moved.received,
            protocol=PROTOCOL_VERSION,
            build=__version__[:20],
            region=self.node.settings.region,
            arrival=self.policies.fetcher.arriving.arrival(),
            reached=self._reached(),
            leaving=self._leaving,
        )

    def _reached(self) -> str:
        found = self.node.transport.reachability()
        return "" if found is Reachability.UNKNOWN else found.value

    @property
    def entry(self) -> bytes:
        """The entry of this peer's admission, with which its work is drawn; empty if trusted."""
        return self.lease.entry if self.lease is not None else b""

    def admits(self, peer: PeerId | None, credential: bytes) -> bool:
        """Whether a client of the bulk plane may use it."""
        if not self.serves and peer not in self.run.manifest.trusted_ids():
            return False
        admitted = admits(self.run, peer, credential, self.node.world.wall_time())
        if admitted and peer is not None:
            self.node.transport.vouch(peer, ADMISSION_LEASE_SECONDS)
        return admitted

    # --- broadcast mode and trust ------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether this peer serves others; else it only makes requests and publishes no address."""
        return self.run.serves(self.peer_id, self.node.settings.role)

    def _vouch_for_trusted(self) -> None:
        for peer in self.run.manifest.trusted_ids():
            self.node.transport.vouch(PeerId(peer), math.inf)

    # --- the trainers' announcements ---------------------------------------------------------

    @staticmethod
    def _newest(watched: Observable[Envelope | None], envelope: Envelope) -> None:
        held = watched.value
        if held is None or held.message.order() < envelope.message.order():
            watched.set(envelope)

    def newest(self) -> list[Envelope]:
        """Return the newest known manifest, checkpoint and step order."""
        known = (self.run.manifest_envelope, self.checkpoint.value, self.order.value)
        return [envelope for envelope in known if envelope is not None]

    def newest_checkpoint(self) -> messages.Checkpoint | None:
        envelope = self.checkpoint.value
        return envelope.expect(messages.Checkpoint) if envelope is not None else None

    def reference_of(self, lineage: int, step: int) -> messages.CheckpointReference | None:
        """The reference of a policy that was announced to this peer, or is on its disk."""
        held = self.store.held((lineage, step))
        return held.reference if held is not None else self.announced.reference_of(lineage, step)

    def _on_checkpoint(self, envelope: Envelope) -> None:
        self._newest(self.checkpoint, envelope)
        self.announced.note(envelope)

    def step_order(self) -> messages.StepOrder | None:
        """Return the step order in force: the newest one of any trainer."""
        envelope = self.order.value
        return envelope.expect(messages.StepOrder) if envelope is not None else None

    def _on_evaluation(self, envelope: Envelope) -> None:
        if envelope.expect(messages.Evaluation).state == "done":
            self._newest(self.evaluation, envelope)

    def _has_work(self) -> bool:
        order = self.step_order()
        return order is not None and order.groups_wanted > 0

    def _on_order(self, envelope: Envelope) -> None:
        before = self.step_order()
        self._newest(self.order, envelope)
        order = self.step_order()
        assert order is not None
        if before is not None and before.run_digest != order.run_digest:
            self.node.events.emit(
                "run.version_in_force", version=order.run_version, step=order.step
            )

    def _on_granted(self, admission: Envelope) -> None:
        """Show an admission to bulk servers and neighbours.

        A new credential costs a new connection and proof at every source, and the one in use is
        valid for a while. The newest is shown at once when nobody renews it."""
        now = self.node.world.now()
        if admission is self._granted or now - self._credential_at >= CREDENTIAL_SECONDS:
            self.node.transport.set_credential(admission.raw)
            self._credential_at = now
        self._granted = admission
        self.gossip.show(admission)

    def _follow_manifest(self, _: Envelope) -> None:
        """Act on a newer manifest, which `versions` has taken."""
        self._keep_policies()
        self._vouch_for_trusted()
        self.node.dht.serving = self.serves
        if self.serves != self._served:
            self._served = self.serves
            self.policies.have.tells_changed()

    async def run_over(self) -> None:
        """Wait until a trainer's step order ends the run."""

        def is_over(envelope: Envelope | None) -> bool:
            return envelope is not None and envelope.expect(messages.StepOrder).final

        await self.order.wait_until(is_over)

    # --- background --------------------------------------------------------------------------

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[trio.Nursery]:
        """Take part in the run in this block's nursery. Raises `UserError` if the run refuses."""
        if self._trusted is not None:
            await self._trusted.open()
        await self.announced.open()
        await self.store.recover()
        self.node.transport.serve_bulk(self.blobs)
        trusted_wanted = 1 if self.lease else NEIGHBOURS_WANTED
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.messenger.run)
                await nursery.start(self.policies.have.run)
                await nursery.start(self.gossip.run)
                self.versions.publish()
                nursery.start_soon(self._evictions.leave)
                nursery.start_soon(self._evictions.cut_off)
                nursery.start_soon(self._neighbours.be_reachable)
                nursery.start_soon(self.policies.provide_newest)
                nursery.start_soon(self.store.settle_received)
                nursery.start_soon(self._report_status)
                nursery.start_soon(self._neighbours.keep_enough, self.gossip, trusted_wanted)
                nursery.start_soon(self.versions.keep_stored)
                nursery.start_soon(self.versions.leave_outgrown)
                nursery.start_soon(self.announced.keep)
                if self._trusted is not None:
                    nursery.start_soon(self._keep_trust)
                    nursery.start_soon(self._trusted.run)
                    nursery.start_soon(self.versions.compare_with_bootstrap)
                if self.lease is not None:
                    await nursery.start(self.lease.keep)
                yield nursery
                order = self.step_order()
                self._leaving = "finished" if order is not None and order.final else "left"
                if self._trusted is not None:
                    await self._trusted.say_goodbye()
                elif self.lease is not None:
                    await self.lease.say_goodbye()
                nursery.cancel_scope.cancel()
        except* NotAdmitted as group:
            reason = str(leaf_errors(group)[0])
            raise UserError(f"run {self.run.id} does not admit this peer: {reason}") from None
        except* Dropped:
            if self._trusted is not None:
                self._named.check()  # a message was refused before `_keep_trust` had its turn
            raise
        finally:
            if self._trusted is not None:
                self._trusted.close()

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
                reachability=self.node.transport.reachability().value,
            )
            with trio.move_on_after(self.node.settings.status_seconds):
                await self.status.changed.wait_change()
