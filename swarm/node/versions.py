"""Versions of a run's manifest: fetched from other peers and stored."""

from collections.abc import Sequence
from datetime import UTC, datetime

import trio

from swarm.errors import PeerError, UserError
from swarm.gossip.gossip import Gossip
from swarm.node.joining import by_peer
from swarm.node.node import Node
from swarm.run.manifest import Outgrown, content_digest
from swarm.run.manifest_exchange import BOOTSTRAP_SECONDS, ask_for_manifests
from swarm.run.run import VERSION_REFUSED, Run
from swarm.wire.envelope import Dropped, Envelope, NeedsNewer
from swarm.wire.identity import PeerId
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import StepOrder
from swarm.world.observable import Observable

VERSION_SECONDS = 2.0
"""Interval between requests for a version of the run that a step order names."""

VERSION_COMPLAINT_SECONDS = 30.0
"""Interval between reports that no trusted peer has this version."""


class Versions:
    """Takes the versions of a run's manifest from gossip and from peers that are asked, finds those
    that steps follow, and stores them on disk."""

    def __init__(self, node: Node, run: Run, gossip: Gossip) -> None:
        self._node = node
        self._run = run
        self._gossip = gossip
        self.changed = Observable(0)
        """Changes whenever a version of the run's manifest is accepted."""
        self._outgrown: Observable[Outgrown | None] = Observable(None)
        self._stored: list[Envelope] = []
        self._asking = trio.Lock()
        self._silent: set[PeerId] = set()
        """Bootstrap peers that did not answer last, which is said once."""
        gossip.listen(RunManifest, self._on_manifest)
        node.follow(run, self.hear)

    def hear(self, envelope: Envelope) -> None:
        """Accept a newer manifest of this run that did not come by gossip, and gossip it."""
        try:
            self._gossip.publish(envelope)
        except Dropped as dropped:
            if dropped.cause != VERSION_REFUSED:  # which is already reported
                self._node.events.emit("gossip.manifest_dropped", cause=dropped.cause)

    def _on_manifest(self, envelope: Envelope) -> None:
        self._node.take_version(self._run, envelope)
        self._node.manifests[self._run.id] = self._run.manifest_envelope
        self.changed.touch()

    def publish(self) -> None:
        """Gossip the newest manifest. Raises `UserError` if expired, or signed in the future."""
        newest = self._run.manifest_envelope
        try:
            self._gossip.publish(newest)
        except Dropped as dropped:
            when = f"while this machine's clock says {_moment(self._node.world.wall_time())}"
            if dropped.cause == "expired":
                raise UserError(
                    f"the manifest of run {self._run.id} expired on "
                    f"{_moment(newest.body.expires_ms / 1000)}, {when}; "
                    "its owner must sign a newer version, unless the clock is wrong"
                ) from None
            if dropped.cause == "from_the_future":
                raise UserError(
                    f"the manifest of run {self._run.id} was signed on "
                    f"{_moment(newest.body.issued_ms / 1000)}, {when}; set the clock and start "
                    "again"
                ) from None
            raise

    async def manifest_of(self, order: StepOrder) -> RunManifest:
        """Return the manifest that an order's step follows; fetch it from a trusted peer if needed.

        Waits until one has it: callers set a deadline, or cancel once the order no longer counts.
        """
        complain_at = 0.0
        while (held := self._run.manifest_of(order)) is None:
            async with self._asking:
                if self._run.manifest_of(order) is not None or await self._ask(order):
                    continue
            if self._node.world.now() >= complain_at:
                complain_at = self._node.world.now() + VERSION_COMPLAINT_SECONDS
                self._node.events.emit(
                    "run.version_awaited", version=order.run_version, step=order.step
                )
            with trio.move_on_after(VERSION_SECONDS):
                await self.changed.wait_change()
        return held

    async def _ask(self, order: StepOrder) -> bool:
        """Ask the trusted peers for the version that an order names; returns whether one had it."""
        for trusted in self._run.manifest.trusted_ids():
            peer = PeerId(trusted)
            if peer == self._node.peer_id:
                continue
            try:
                await self._node.reach(peer)
                for envelope in await ask_for_manifests(
                    self._node.transport, peer, order.run_digest, wanted=self._run.id
                ):
                    if (
                        envelope.body.run == self._run.id
                        and content_digest(envelope) == order.run_digest
                    ):
                        self.hear(envelope)
                        self._run.keep(envelope)
                        self.changed.touch()
                        return True
            except Outgrown as outgrown:
                self.outgrow(outgrown)
            except PeerError as error:
                self._node.events.emit("gossip.version_not_told", remote=peer, reason=str(error))
        return False

    def outgrow(self, outgrown: Outgrown) -> None:
        """Note a version of the run that this build cannot follow, if who signed it owns the run or
        may own it next. Older ones are replays."""
        owners = (self._run.owner, *self._run.manifest.successors)
        newer = outgrown.version > self._run.manifest.version
        if outgrown.run == self._run.id and outgrown.signer in owners and newer:
            self._outgrown.set(outgrown)

    def on_outgrown(self, newer: NeedsNewer) -> None:
        """The same of a manifest that the gate could not read."""
        self.outgrow(Outgrown(newer.run, newer.version, newer.needs, newer.sender))

    async def leave_outgrown(self) -> None:
        """Wait until the run needs a newer build; raises `Outgrown` then."""
        await self._outgrown.wait_until(lambda outgrown: outgrown is not None)
        assert self._outgrown.value is not None
        raise self._outgrown.value

    async def store(self) -> None:
        """Store the versions that the run remembers durably."""
        versions = self._run.versions()
        if versions != self._stored:
            await self._node.store_versions(self._run.id, versions)
            self._stored = versions

    async def keep_stored(self) -> None:
        while True:
            await self.store()
            if self._stored == self._run.versions():
                await self.changed.wait_change()

    async def compare_with_bootstrap(self) -> None:
        """Exchange newer manifests with the bootstrap peers, both ways, until cancelled."""
        while True:
            await trio.sleep(BOOTSTRAP_SECONDS)
            peers = by_peer(self._node.bootstrap)
            self._silent &= peers.keys()
            # Side by side: a name may list peers that are long gone, and each costs its deadlines.
            async with trio.open_nursery() as nursery:
                for peer, addresses in peers.items():
                    if peer != self._node.peer_id:
                        nursery.start_soon(self._compare_with, peer, addresses)

    async def _compare_with(self, peer: PeerId, addresses: Sequence[str]) -> None:
        mine = self._run.manifest_envelope
        try:
            await self._node.transport.connect(peer, addresses)
            for newer in await ask_for_manifests(
                self._node.transport, peer, mine.raw, wanted=self._run.id
            ):
                if newer.body.run == self._run.id:
                    self.hear(newer)
            self._silent.discard(peer)
        except Outgrown as outgrown:
            self.outgrow(outgrown)
        except PeerError as error:
            if peer not in self._silent:
                self._silent.add(peer)
                self._node.events.emit("dht.bootstrap_silent", remote=peer, reason=str(error))


def _moment(wall_seconds: float) -> str:
    return datetime.fromtimestamp(wall_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
