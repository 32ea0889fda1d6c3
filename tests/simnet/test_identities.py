"""One machine with a crowd of identities that take places and deliver nothing."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest
import trio

from simnet.adversaries.base import Adversary
from simnet.clock import run_virtual
from simnet.compute import Hardware, Workload
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Plan, Simulation
from swarm.envelope import Gate, seal
from swarm.errors import PeerError
from swarm.identity import Identity, PeerId
from swarm.ledger.entries import Admitted, decode
from swarm.messages import Admission, Admissions, Heartbeat
from swarm.messenger import Messenger, first

CROWD = 40
ADMISSIONS = Admissions(unproven_max=24, helpers_max=24, range_max=6)
TRUSTED = ("trainer", "v0")


class Crowd(Adversary):
    """Each of its identities says heartbeats to every trusted peer, as long words as it may."""

    roles: ClassVar[list[str]] = ["inference"]
    admitted: ClassVar[set[str]] = set()

    async def run(self) -> None:
        here = cast(Any, self._peer.node.transport)
        network = here.host.rpartition(".")[0]
        async with trio.open_nursery() as nursery:
            for number in range(CROWD):
                identity = Identity(self._peer.node.world.secret_bytes(32))
                nursery.start_soon(self._live, identity, f"{network}.{number + 2}")

    async def _live(self, identity: Identity, host: str) -> None:
        node, run = self._peer.node, self._peer.run
        here = cast(Any, node.transport)
        async with (
            here._network.transport(
                identity, world=node.world, disk=node.disk, line=here.line, host=host
            ) as transport,
            trio.open_nursery() as nursery,
        ):
            gate = Gate(node.world, run.id, run.permits, run.trusts)
            messenger = Messenger(transport, gate, node.events)
            await nursery.start(messenger.run)
            beat = Heartbeat(roles=self.roles, doing="\x1b" * 80, bytes_sent=2**53)
            for sequence in range(10**6):
                for trusted in run.manifest.trusted_ids():
                    record = node.record(trusted)
                    envelope = seal(
                        identity, beat, run=run.id, sequence=sequence + 1,
                        wall_time=node.world.wall_time(), lifetime_seconds=60,
                    )  # fmt: skip
                    try:
                        if record is not None:
                            await transport.connect(PeerId(trusted), record.addresses)
                            reply = await messenger.request(PeerId(trusted), envelope)
                            if first(reply, Admission) is not None:
                                self.admitted.add(identity.peer_id)
                    except PeerError:
                        continue
                await trio.sleep(5.0)


class Watchers(Crowd):
    roles: ClassVar[list[str]] = ["observer"]


def seconds_to_the_end(acts: type[Crowd] | None) -> float:
    """Virtual seconds of a run whose workers come after the crowd, if there is one."""
    took: list[float] = []
    simulation = Simulation(7, workload=Workload(model_bytes=3_000_000, completion_tokens_mean=64))

    async def main() -> None:
        async with simulation.running():
            await start_bootstrap(
                simulation, trainers=["trainer"], validators=["v0"], steps=6,
                groups_per_step=8, max_new_tokens=256, admissions=ADMISSIONS,
            )  # fmt: skip
            over = simulation.expect("trainer.run_complete", ["trainer"])
            hardware = Hardware(step_seconds=5.0)
            peers = {}
            for plan in (
                Plan("v0", ["validator"]),
                Plan("trainer", ["trainer"], hardware=hardware),
            ):
                peers[plan.name] = simulation.add(plan)
                await peers[plan.name].start()
            if acts is not None:
                acts.admitted.clear()
                await simulation.add(Plan("crowd", ["relay"], acts=acts)).start()
                await trio.sleep(30)
            began = simulation.now()
            for number in range(3):
                await simulation.add(Plan(f"w{number}", ["inference"])).start()
            assert await simulation.meet(over, 600.0)
            took.append(simulation.now() - began)
            for name in TRUSTED if acts is not None else ():
                part = peers[name].node.part._trusted  # type: ignore[union-attr]
                assert len(part.registrar._members.own) <= 2 * 24 + 3
                logged = [decode(raw) for raw in part._log.entries(0, 10_000)]
                strangers = [entry.peer for entry in logged if isinstance(entry, Admitted)]
                assert not acts.admitted.intersection(strangers), "they leave no trace"  # type: ignore[union-attr]

    run_virtual(main, seed=7, limit_seconds=3600)
    assert simulation.violations == []
    return took[0]


@pytest.mark.parametrize("acts", [Crowd, Watchers])
def test_a_run_keeps_its_pace_beside_a_crowd_of_identities(acts: type[Crowd]) -> None:
    beside = seconds_to_the_end(acts)
    assert 0 < len(acts.admitted) <= 2 * 2 * ADMISSIONS.range_max
    assert seconds_to_the_end(None) > 0.9 * beside
