"""A run whose manifest changes while it goes on: nobody is judged by another version than its
step's, and everybody says what changed and from when on."""

from __future__ import annotations

from typing import Any

import msgspec

from simnet.clock import run_virtual
from simnet.compute import Hardware, Workload
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from simnet.world import EPOCH
from swarm import defaults
from swarm.envelope import Envelope, seal
from swarm.events import Event
from swarm.messages import RunManifest

STEPS = 8


def signed(simulation: Simulation, message: RunManifest) -> Envelope:
    """A version of the run, signed by its owner as the simulation's first one is."""
    owner = simulation.identity("owner")
    return seal(
        owner,
        message,
        run=f"{owner.peer_id}/{message.name}",
        sequence=int((EPOCH + simulation.now()) * 1000),
        wall_time=EPOCH + simulation.now(),
        lifetime_seconds=defaults.MANIFEST_LIFETIME_SECONDS,
    )


def changed(manifest: RunManifest, version: int, **tables: dict[str, Any]) -> RunManifest:
    """Another version, with these fields of its tables."""
    replace = msgspec.structs.replace
    new = {name: replace(getattr(manifest, name), **some) for name, some in tables.items()}
    return replace(manifest, version=version, **new)


class Watching:
    """A small run, and all that its peers say and their children truly do."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.said: list[tuple[str, Event]] = []
        self.configured: list[tuple[int, float, int]] = []
        """(step, learning rate, steps in all) of each training step."""
        simulation.listeners.append(lambda _, peer, event: self.said.append((peer.name, event)))
        simulation.witnesses.append(self._witness)

    def _witness(self, _peer: Peer, what: str, facts: dict[str, Any]) -> None:
        if what == "trained":
            self.configured.append((facts["step"], facts["learning_rate"], facts["steps"]))

    def named(self, name: str, peer: str | None = None) -> list[dict[str, Any]]:
        return [
            event.fields for who, event in self.said if event.name == name and peer in (None, who)
        ]

    async def start(self, *names: str, steps: int = STEPS, **run: Any) -> RunManifest:
        bootstrap = await start_bootstrap(
            self.simulation, trainers=["trainer"], validators=["validator"], steps=steps,
            groups_per_step=8, max_new_tokens=8, **run,
        )  # fmt: skip
        for name in names:
            await self.add(name)
        message = bootstrap.plan.manifests[0].message
        assert isinstance(message, RunManifest)
        return message

    async def add(self, name: str) -> Peer:
        options: dict[str, Any] = {"trainer.model": "simulated"} if name == "trainer" else {}
        hardware = Hardware(step_seconds=10.0, tokens_per_second=20.0)
        peer = self.simulation.add(
            Plan(name, [name.partition("-")[0]], options=options, hardware=hardware)
        )
        await peer.start()
        return peer

    def part(self, name: str) -> Any:
        node = self.simulation.peers[name].node
        assert node is not None and node.part is not None
        return node.part

    async def step_trained(self, step: int) -> None:
        expected = self.simulation.expect(
            "trainer.step_trained", ["trainer"], lambda event: event.fields["step"] >= step
        )
        assert await self.simulation.meet(expected, 3000)

    async def over(self) -> None:
        over = self.simulation.expect("trainer.run_complete", ["trainer"])
        assert await self.simulation.meet(over, 6000)

    def check_nobody_is_blamed(self) -> None:
        assert self.named("membership.peer_evicted") == []
        refused = [f for f in self.named("validator.verdict") if f["outcome"] != "accepted"]
        assert {f["failed"] for f in refused} <= {"stale", "step"}, refused


def watch(main: Any, seed: int = 5) -> Watching:
    """`main(watching)` to its end. Completions are longer than the run allows, so that a length
    limit changes every one of them."""
    simulation = Simulation(
        seed, workload=Workload(model_bytes=3_000_000, completion_tokens_mean=500.0)
    )
    watching = Watching(simulation)

    async def virtual() -> None:
        async with simulation.running():
            await main(watching)

    run_virtual(virtual, seed=seed, limit_seconds=8000)
    assert simulation.violations == []
    return watching


ALL = ("validator", "trainer", "relay-0", "inference-0", "inference-1")


def test_a_longer_limit_and_another_learning_rate_in_mid_run_harm_nobody() -> None:
    async def main(watching: Watching) -> None:
        first = await watching.start(*ALL)
        await watching.step_trained(1)
        second = changed(
            first, 2, sampling={"max_new_tokens": 9}, objective={"learning_rate": 1e-3}
        )
        watching.part("validator").gossip.publish(signed(watching.simulation, second))
        await watching.over()

    watching = watch(main)
    watching.check_nobody_is_blamed()
    in_force = watching.named("run.version_in_force")
    assert len(in_force) == len(ALL) and len({f["step"] for f in in_force}) == 1
    since = in_force[0]["step"]
    assert 1 < since < STEPS and {f["version"] for f in in_force} == {2}
    for name in ALL:
        heard = watching.named("run.version_signed", name)
        assert [f["version"] for f in heard] == [2]
        assert heard[0]["changes"] == [
            "sampling.max_new_tokens 8 → 9 (from the next step)",
            "objective.learning_rate 3e-07 → 0.001 (from the next step)",
        ]
    rates = {step: rate for step, rate, _ in watching.configured}
    assert rates == {step: 1e-3 if step >= since else 3e-7 for step in range(STEPS)}
