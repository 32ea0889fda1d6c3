"""Workers and validators that cheat, or burden others. Each runs a role's code up to its attack."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, ClassVar, cast

import msgspec
import trio
from blake3 import blake3

from peers.inference.delivery import Deliveries
from peers.inference.outbox import Made
from peers.inference.pending import PendingSubmission
from peers.inference.role import InferenceRole
from peers.validator.role import ValidatorRole
from simnet.adversaries.base import Kind, beside, deliver_nothing
from simnet.compute.rollouts import SimulatedRollouts
from swarm.errors import PeerError
from swarm.gossip.topics import RUN, WORK
from swarm.jobs import SubmissionOrder
from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import digest, nonce_of
from swarm.transport import BlobReference, Source
from swarm.wire.envelope import STATE_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Acknowledgement, Presence, StepOrder, Submission


class Copier(InferenceRole):
    """Hands in another worker's files as its own, byte for byte, while that worker delivers them.
    The files follow from the seed, so any peer with the weights can make them."""

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        self._victim = peer.peer_id
        self._entries: dict[str, bytes] = {}
        """Entries of all workers, from the trusted peers' digests."""
        peer.gossip.listen(Acknowledgement, self._hear)
        peer.gossip.listen(Presence, self._hear_presence)

    def _hear(self, envelope: Envelope) -> None:
        worker = envelope.expect(Acknowledgement).worker
        if worker in self._entries:
            self._victim = PeerId(worker)

    def _hear_presence(self, envelope: Envelope) -> None:
        for each in envelope.expect(Presence).peers:
            if each.slot is not None and each.slot.entry:
                self._entries[each.peer] = each.slot.entry

    def _asked(self, order: StepOrder, manifest: RunManifest) -> SubmissionOrder:
        nonce = nonce_of(order.nonce, self._entries.get(self._victim, self._peer.entry))
        asked = super()._asked(order, manifest)
        return msgspec.structs.replace(asked, worker=self._victim, nonce=nonce)


class Claimant(Copier):
    """Announces another worker's files as its own and delivers none."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        deliver_nothing(peer)


class DoubleDeliverer(InferenceRole):
    """Sends the last validator in rank a second file under every number. It differs in rounding, so
    that it hashes differently and passes every check."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        self._deliveries = DoubleDeliveries(peer)


class DoubleDeliveries(Deliveries):
    async def see_through(
        self, made: Made, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        disk = self._node.disk
        rollouts = msgspec.msgpack.decode(await disk.read(made.path), type=SimulatedRollouts)
        raw = msgspec.msgpack.encode(msgspec.structs.replace(rollouts, variant=1))
        path = f"{made.path}.second"
        await disk.write(path, raw)
        second = msgspec.structs.replace(
            made.submission, digest=blake3(raw).digest(), size_bytes=len(raw)
        )
        last = self.ranked(made.submission, made.nonce)[-1]
        announced = await self._peer.seal(second, STATE_LIFETIME_SECONDS)
        await self.deliver(PeerId(last), announced, replace(made, submission=second, path=path))
        await super().see_through(made, task_status=task_status)


class NonceGrinder(InferenceRole):
    """Draws its submissions with an entry ground after it knew the nonce, not its admission's."""

    def _begin_submission(self, order: StepOrder, manifest: RunManifest) -> PendingSubmission:
        lease = self._peer.lease
        if lease is not None:
            lease.entry = digest("simnet/1/ground", order.nonce)[: len(lease.entry)]
        return super()._begin_submission(order, manifest)


class NumberSkipper(InferenceRole):
    """Keeps back every other file, as if it did not like it, and hands in the next numbers."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        transport = peer.node.transport
        push = transport.push

        async def push_liked(target: Source, reference: BlobReference, path: str) -> None:
            if reference.digest[0] % 2:
                await push(target, reference, path)

        cast(Any, transport).push = push_liked


def occasional_liar_fabricates(order: SubmissionOrder) -> str:
    """Other weights, in one of eight submissions."""
    return "weights" if order.seed()[0] % 8 == 0 else ""


SIZE_BYTES = 1 << 20
AT_ONCE = 10


class Pusher(InferenceRole):
    """Pushes files that it never announces, ten at once."""

    async def run(self) -> None:
        await beside(super().run, self._push)

    async def _push(self) -> None:
        async with trio.open_nursery() as nursery:
            for validator in self._run.manifest.validator_ids():
                for number in range(AT_ONCE):
                    nursery.start_soon(self._push_one, validator, number)

    async def _push_one(self, validator: str, number: int) -> None:
        raw = self._node.world.secret_bytes(32) + bytes(SIZE_BYTES)
        path = f"pushed/{number}-{validator}"
        await self._node.disk.write(path, raw)
        record = self._node.record(validator)
        addresses = tuple(record.bulk_addresses) if record else ()
        try:
            await self._node.transport.push(
                Source(PeerId(validator), addresses),
                BlobReference(blake3(raw).digest(), len(raw)),
                path,
            )
        except PeerError:
            return


TIMES = 30


class Reannouncer(InferenceRole):
    """Announces every submission thirty times, each time signed anew."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        messenger = peer.messenger
        request: Callable[..., Awaitable[Any]] = messenger.request

        async def request_often(to: PeerId, envelope: Envelope, *more: Any, **how: Any) -> Any:
            reply = await request(to, envelope, *more, **how)
            for _ in range(TIMES if isinstance(envelope.message, Submission) else 0):
                try:
                    again = await peer.seal(envelope.message, STATE_LIFETIME_SECONDS)
                    await request(to, again, *more, **how)
                except PeerError:
                    break
            return reply

        cast(Any, messenger).request = request_often


def refusing_validator_fabricates(order: SubmissionOrder) -> str:
    """A refusal, for about a third of all workers."""
    return "refusal" if sum(order.worker.encode()) % 3 == 0 else ""


class Shortener(InferenceRole):
    """Leaves the last group out of every submission, as if it had not liked it."""

    def _asked(self, order: StepOrder, manifest: RunManifest) -> SubmissionOrder:
        asked = super()._asked(order, manifest)
        return msgspec.structs.replace(asked, groups=asked.groups - 1)


class Staller(InferenceRole):
    """Leaves out every even number, so that the odd ones wait for what never comes."""

    def _begin_submission(self, order: StepOrder, manifest: RunManifest) -> PendingSubmission:
        self._pending.number |= 1
        return super()._begin_submission(order, manifest)


class SubmissionFlooder(InferenceRole):
    """Also delivers every submission under numbers that no order asked for."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        messenger = peer.messenger
        request: Callable[..., Awaitable[Any]] = messenger.request

        async def request_often(to: PeerId, envelope: Envelope, *more: Any, **how: Any) -> Any:
            if isinstance(envelope.message, Submission):
                for number in range(1000, 1003):
                    again = msgspec.structs.replace(envelope.message, number=number)
                    await request(to, await peer.seal(again, STATE_LIFETIME_SECONDS), *more, **how)
            return await request(to, envelope, *more, **how)

        cast(Any, messenger).request = request_often


HONEST_STEPS = 6


def turncoat_fabricates(order: SubmissionOrder) -> str:
    """Other weights, after `HONEST_STEPS`."""
    return "weights" if order.step >= HONEST_STEPS else ""


def validator_shopper_fabricates(order: SubmissionOrder) -> str:
    """Other weights, in half of the submissions."""
    return "weights" if order.seed()[0] % 2 else ""


class ValidatorShopper(InferenceRole):
    """Shows every submission to all validators at once, hoping that one does not recompute it."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        self._deliveries = _ToAll(peer)


class _ToAll(Deliveries):
    async def deliver(self, validator: PeerId, announced: Envelope, made: Made) -> bool:
        for other in reversed(self._run.manifest.validator_ids()):
            if other != validator:
                try:
                    await super().deliver(PeerId(other), announced, made)
                except PeerError:
                    continue
        return await super().deliver(validator, announced, made)


ANNOUNCED_AT_ONCE = 20
EVERY_SECONDS = 1.0


class VerdictFlooder(InferenceRole):
    """Announces invented files all the time, to have refusals signed, logged and gossiped."""

    async def run(self) -> None:
        await beside(super().run, self._flood, EVERY_SECONDS)

    async def _flood(self) -> None:
        order, lease = self._peer.step_order(), self._peer.lease
        if order is None or lease is None or lease.admission is None:
            return
        async with trio.open_nursery() as nursery:
            for validator in self._run.manifest.validator_ids():
                for _ in range(ANNOUNCED_AT_ONCE):
                    invented = Submission(
                        lineage=order.lineage,
                        step=order.step,
                        policy=order.policy,
                        number=self._node.world.secret_bytes(1)[0],
                        digest=self._node.world.secret_bytes(32),
                        size_bytes=1000,
                        groups=self._run.manifest.sampling.groups_per_submission,
                        run_digest=order.run_digest,
                        entry=self._peer.entry,
                    )
                    nursery.start_soon(self._announce, PeerId(validator), invented)

    async def _announce(self, validator: PeerId, invented: Submission) -> None:
        lease = self._peer.lease
        shown = [lease.admission] if lease is not None and lease.admission is not None else []
        envelope = await self._peer.seal(invented, STATE_LIFETIME_SECONDS)
        try:
            await self._peer.messenger.request(validator, envelope, *shown, deadline_seconds=5.0)
        except PeerError:
            return


class Withholder(InferenceRole):
    """Announces submissions and never delivers their files."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        deliver_nothing(peer)


KINDS = {
    "copier": Kind(Copier, "inference"),
    "claimant": Kind(Claimant, "inference"),
    "double-deliverer": Kind(DoubleDeliverer, "inference"),
    # Replaces 2 % of its tokens by ones that suit it, each within the bound on a single token.
    "editor": Kind(InferenceRole, "inference", fabricates="edits"),
    # Hands in files that cannot be parsed, and returns with a new key whenever it is evicted.
    "garbage-returner": Kind(InferenceRole, "inference", fabricates="garbage", returns=True),
    # Delivers files that cannot be parsed.
    "malformed-files": Kind(InferenceRole, "inference", fabricates="garbage"),
    "nonce-grinder": Kind(NonceGrinder, "inference"),
    "number-skipper": Kind(NumberSkipper, "inference"),
    # Lies in every eighth submission.
    "occasional-liar": Kind(InferenceRole, "inference", fabricates=occasional_liar_fabricates),
    # Delivers rollouts that its seed does not give.
    "other-prompts": Kind(InferenceRole, "inference", fabricates="prompts"),
    # A validator that accepts everything.
    "permissive-validator": Kind(ValidatorRole, "validator", fabricates="approval"),
    "pusher": Kind(Pusher, "inference"),
    "reannouncer": Kind(Reannouncer, "inference"),
    # A validator that refuses all work of one worker, and claims to have recomputed it.
    "refusing-validator": Kind(
        ValidatorRole, "validator", fabricates=refusing_validator_fabricates, undefended=True
    ),
    # Lies in everything, and returns with a new key whenever it is evicted.
    "returner": Kind(InferenceRole, "inference", fabricates="weights", returns=True),
    "shortener": Kind(Shortener, "inference"),
    # Has no model: hands in programs that sleep, which take long to grade.
    "sleepers": Kind(InferenceRole, "inference", fabricates="sleepers"),
    "staller": Kind(Staller, "inference"),
    "submission-flooder": Kind(SubmissionFlooder, "inference"),
    # Earns a record with honest work, then hands in other weights' rollouts.
    "turncoat": Kind(InferenceRole, "inference", fabricates=turncoat_fabricates),
    "validator-shopper": Kind(
        ValidatorShopper, "inference", fabricates=validator_shopper_fabricates
    ),
    "verdict-flooder": Kind(VerdictFlooder, "inference"),
    "withholder": Kind(Withholder, "inference"),
    # Generates with other weights.
    "wrong-weights": Kind(InferenceRole, "inference", fabricates="weights"),
}
