"""A run keeps its pace beside identities that announce what never serves a batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import trio
from blake3 import blake3

from simnet.adversaries.base import Adversary, beside
from simnet.clock import run_virtual
from simnet.compute import Hardware, Setting, Workload, rollouts
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Plan, Simulation
from swarm.errors import PeerError
from swarm.identity import PeerId
from swarm.jobs import SubmissionOrder
from swarm.messages import StepOrder, Submission
from swarm.rollouts.seeds import nonce_of
from swarm.transport import BlobReference, Source

ATTACKS_PER_SECOND = 2.0
SECONDS = 40.0
WORKLOAD = Workload(model_bytes=500_000, completion_tokens_mean=64)


class Hostile(Adversary):
    """Makes files of another model by hand, and announces what it likes to every validator."""

    async def run(self) -> None:
        self._step, self._next, self._round = -1, 0, 0
        await beside(trio.sleep_forever, self._attack_if_open, 1 / ATTACKS_PER_SECOND)

    async def _attack_if_open(self) -> None:
        order, lease = self._peer.step_order(), self._peer.lease
        if order is None or lease is None or order.groups_wanted == 0:
            return
        if order.step != self._step:
            self._step, self._next = order.step, 0
        self._round += 1
        for validator in self._peer.run.manifest.validator_ids():
            try:
                await self._peer.node.reach(PeerId(validator))
                await self.strike(PeerId(validator), order)
            except PeerError:
                continue

    async def strike(self, validator: PeerId, order: StepOrder) -> None:
        raise NotImplementedError

    def make(self, order: StepOrder, number: int) -> bytes:
        """A file that only a prefill finds to be of another model."""
        manifest = self._peer.run.manifest
        made = rollouts(
            Setting(self._peer.node.disk, Hardware(), WORKLOAD),  # type: ignore[arg-type]
            SubmissionOrder(
                run=self._peer.run.id, policy=order.checkpoint, step=order.step,
                nonce=nonce_of(order.nonce, self._peer.entry), worker=self._peer.peer_id,
                number=number, groups=manifest.sampling.groups_per_submission,
                environments=manifest.environments, sampling=manifest.sampling,
            ),
        )  # fmt: skip
        made.invented = True
        return msgspec.msgpack.encode(made)

    async def hand_in(self, validator: PeerId, raw: bytes) -> None:
        node, reference = self._peer.node, BlobReference(blake3(raw).digest(), len(raw))
        await node.disk.write("file", raw)
        record = node.record(validator)
        source = Source(validator, tuple(record.bulk_addresses) if record else ())
        await node.transport.push(source, reference, "file")

    async def announce(
        self, validator: PeerId, order: StepOrder, number: int, raw: bytes
    ) -> list[Any]:
        submission = Submission(
            lineage=order.lineage, step=order.step, policy=order.policy, number=number,
            digest=blake3(raw).digest(), size_bytes=len(raw), run_digest=order.run_digest,
            groups=self._peer.run.manifest.sampling.groups_per_submission,
            entry=self._peer.entry,
        )  # fmt: skip
        assert self._peer.lease is not None and self._peer.lease.admission is not None
        announced = await self._peer.seal(submission, 600.0)
        return await self._peer.messenger.request(
            validator, announced, self._peer.lease.admission, deadline_seconds=2.0
        )


class OddNumbers(Hostile):
    """Never delivers an even number, so that the odd ones wait for it."""

    async def strike(self, validator: PeerId, order: StepOrder) -> None:
        for number in range(1, order.submissions_max, 2):
            raw = self.make(order, number)
            await self.hand_in(validator, raw)
            await self.announce(validator, order, number, raw)


class WithoutFiles(Hostile):
    """Announces a number again and again, each time another file, and delivers none."""

    async def strike(self, validator: PeerId, order: StepOrder) -> None:
        for number in range(order.submissions_max):
            await self.announce(validator, order, number, b"%d %d" % (self._round, number))


class OfAnotherModel(Hostile):
    """Delivers every number in its turn, of another model."""

    async def strike(self, validator: PeerId, order: StepOrder) -> None:
        if self._next < order.submissions_max:
            raw = self.make(order, self._next)
            await self.hand_in(validator, raw)
            self._next += bool(await self.announce(validator, order, self._next, raw))


class VerdictFlood(Hostile):
    """Announces numbers that the order does not allow: each is refused."""

    async def strike(self, validator: PeerId, order: StepOrder) -> None:
        for number in range(10):
            await self.announce(validator, order, 10**6 + number, b"%d %d" % (self._round, number))


class Repeats(Hostile):
    """Announces a file again and again."""

    async def strike(self, validator: PeerId, order: StepOrder) -> None:
        raw = self.make(order, 0)
        await self.hand_in(validator, raw)
        for _ in range(20):
            await self.announce(validator, order, 0, raw)


def policies(acts: type[Hostile] | None, hostile: int) -> int:
    """Policies trained in `SECONDS` beside hostile peers that are there from the beginning."""
    simulation = Simulation(7, workload=WORKLOAD)

    async def main() -> None:
        async with simulation.running():
            await start_bootstrap(
                simulation, trainers=["trainer"], validators=["v0", "v1"], groups_per_step=8,
                groups_per_submission=1,
                max_new_tokens=256,
            )  # fmt: skip
            hardware = Hardware(tokens_per_second=1500.0, step_seconds=2.0)
            for plan in (
                Plan("v0", ["validator"]),
                Plan("v1", ["validator"]),
                Plan("trainer", ["trainer"], hardware=hardware),
            ):
                await simulation.add(plan).start()
            for number in range(hostile):
                await simulation.add(Plan(f"hostile-{number}", ["inference"], acts=acts)).start()
            for number in range(3):
                plan = Plan(f"w{number}", ["inference"], hardware=hardware)
                await simulation.add(plan).start()
            await trio.sleep(SECONDS)

    run_virtual(main, seed=7, limit_seconds=3600)
    assert simulation.violations == []
    return simulation.trace.counts["trainer.step_trained"]


@cache
def undisturbed() -> int:
    return policies(None, 0)


ATTACKS = (OddNumbers, WithoutFiles, OfAnotherModel, VerdictFlood, Repeats)
FAST = (OddNumbers, WithoutFiles)


@pytest.mark.parametrize(
    ("acts", "hostile"),
    [
        pytest.param(acts, hostile, marks=() if acts in FAST and hostile == 4 else pytest.mark.slow)
        for acts in ATTACKS
        for hostile in (4, 16)
    ],
)
def test_a_run_keeps_its_pace(acts: type[Hostile], hostile: int) -> None:
    assert policies(acts, hostile) >= 0.9 * undisturbed()
