"""A run whose manifest changes while it goes on: nobody is judged by another version than its
step's, and everybody says what changed and from when on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import trio

from peers.inference.pending import PendingSubmission
from peers.inference.role import InferenceRole
from peers.inference.turns import ServedTurns, Unwanted
from simnet.clock import EPOCH, run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import SIMULATED, Peer, Plan, Simulation
from swarm.events import Event
from swarm.run.manifest import MANIFEST_LIFETIME_SECONDS, content_digest
from swarm.wire.envelope import Envelope, seal
from swarm.wire.manifest import RunManifest, TrustedKey
from swarm.wire.messages import StepOrder
from tests.orders import submission_order

RUNNER = partial(run_virtual, seed=5)
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
        lifetime_seconds=MANIFEST_LIFETIME_SECONDS,
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

    async def start(self, *names: str, **run: Any) -> RunManifest:
        bootstrap = await start_bootstrap(
            self.simulation, trainers=["trainer"], validators=["validator"],
            **{"steps": STEPS, "groups_per_step": 8, "max_new_tokens": 8, **run},
        )  # fmt: skip
        for name in names:
            await self.add(name)
        message = bootstrap.plan.manifests[0].message
        assert isinstance(message, RunManifest)
        return message

    async def add(self, name: str) -> Peer:
        hardware = Hardware(step_seconds=10.0, tokens_per_second=20.0)
        peer = self.simulation.add(Plan(name, [name.partition("-")[0]], hardware=hardware))
        await peer.start()
        return peer

    def part(self, name: str) -> Any:
        return self.simulation.peers[name].part

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


@asynccontextmanager
async def watched() -> AsyncIterator[Watching]:
    """Completions are longer than the run allows, so that a length limit changes every one."""
    simulation = Simulation(
        5, workload=Workload(model_bytes=3_000_000, completion_tokens_mean=500.0)
    )
    async with simulation.running():
        yield Watching(simulation)
    assert simulation.violations == []


ALL = ("validator", "trainer", "relay-0", "inference-0", "inference-1")


async def test_who_comes_or_returns_in_between_gets_the_version_that_its_step_follows() -> None:
    """The open step follows version 1 while bootstrap peer and newcomers know version 2; validator
    and trainer lose their processes, one worker its disk."""
    async with watched() as watching:
        simulation = watching.simulation
        first = await watching.start("validator", "trainer", "inference-0")
        await watching.step_trained(0)
        second = changed(
            first, 2, sampling={"max_new_tokens": 9}, optimiser={"learning_rate": 1e-3}
        )
        envelope = signed(simulation, second)
        watching.part("validator").gossip.publish(envelope)
        simulation.peers["bootstrap"].node.hear_manifest(envelope)  # type: ignore[union-attr]
        assert watching.part("trainer").step_order().run_version == 1
        made = simulation.expect("inference.submission_made", ["inference-1"])
        await watching.add("inference-1")
        for name in ("validator", "trainer"):
            await simulation.peers[name].kill()
            await simulation.peers[name].start(resume=True)
        assert await simulation.meet(made, 300)
        await watching.over()
    watching.check_nobody_is_blamed()
    made_first = watching.named("inference.submission_made", "inference-1")[0]
    since = watching.named("run.version_in_force", "inference-0")[0]["step"]
    assert made_first["step"] < since, "the newcomer was to begin under the older version"
    rates = {step: rate for step, rate, _ in watching.configured}
    assert rates == {step: 1e-3 if step >= since else 3e-7 for step in range(STEPS)}


async def test_everything_that_may_change_may_change_at_once() -> None:
    """Batches, groups, temperature, filters, staleness and asynchrony, there and back again."""
    async with watched() as watching:
        first = await watching.start(*ALL, steps=14)
        second = changed(
            first, 2,
            sampling={"temperature": 0.5, "group_size": 4, "groups_per_submission": 2},
            schedule={"groups_per_step": 12, "asynchrony": 5, "max_staleness": 8},
            filters={"fill": "refill", "refill_seconds": 60.0},
            objective={"kl_coefficient": 0.0},
            optimiser={"optimiser_steps": 3},
            thresholds={"recompute_share_min": 0.5, "honest_margin": 0.02},
        )  # fmt: skip
        for step, version in ((1, second), (7, msgspec.structs.replace(first, version=3))):
            await watching.step_trained(step)
            watching.part("trainer").gossip.publish(signed(watching.simulation, version))
        await watching.over()
    watching.check_nobody_is_blamed()
    since = [f["step"] for f in watching.named("run.version_in_force", "trainer")]
    assert len(since) == 2 and [step for step, *_ in watching.configured] == list(range(14))
    opened = watching.named("trainer.step_opened", "trainer")
    policies = [f["policy"] for f in opened]
    assert policies == sorted(policies), "no step goes back to an older policy"
    ages = {f["step"]: f["step"] - f["policy"] for f in opened}
    assert max(age for step, age in ages.items() if step < since[0]) == 2
    assert 2 < max(age for step, age in ages.items() if since[0] <= step < since[1]) <= 5


@pytest.mark.parametrize("steps", [2, 12])
async def test_a_run_is_made_shorter_or_longer(steps: int) -> None:
    """Two steps are fewer than are done by then: the run is over."""
    async with watched() as watching:
        first = await watching.start(*ALL)
        await watching.step_trained(3)
        shorter = changed(first, 2, schedule={"steps": steps})
        over = watching.simulation.expect("trainer.run_complete", ["trainer"])
        heard = watching.simulation.expect("inference.run_over", ["inference-0", "inference-1"])
        watching.part("relay-0").gossip.publish(signed(watching.simulation, shorter))
        assert await watching.simulation.meet(over, 60 if steps == 2 else 3000)
        assert await watching.simulation.meet(heard, 60)
    watching.check_nobody_is_blamed()
    (last,) = watching.named("trainer.run_complete")
    assert last["steps"] == 12 if steps == 12 else 4 <= last["steps"] <= 5


class Headstrong(InferenceRole):
    """Works by the newest manifest, whatever its step follows, as an older Swarm does."""

    def _begin_submission(self, order: StepOrder, manifest: RunManifest) -> PendingSubmission:
        newest = content_digest(self._run.manifest_envelope)
        by_newest = msgspec.structs.replace(order, run_digest=newest)
        return super()._begin_submission(by_newest, self._run.manifest)


async def test_work_by_another_version_is_refused_and_proves_nothing() -> None:
    async with watched() as watching:
        simulation = watching.simulation
        first = await watching.start(*ALL, groups_per_step=24)  # time enough to hear of another
        hardware = Hardware(tokens_per_second=20.0)
        plan = Plan("headstrong", ["inference"], hardware=hardware, acts=Headstrong)
        await simulation.add(plan).start()
        opened = simulation.expect(
            "trainer.step_opened", ["trainer"], lambda event: event.fields["step"] > 2
        )
        assert await simulation.meet(opened, 3000)
        second = changed(first, 2, sampling={"max_new_tokens": 9})
        watching.part("validator").gossip.publish(signed(simulation, second))
        await watching.over()
    assert watching.named("membership.peer_evicted") == []
    verdicts = watching.named("validator.verdict")
    headstrong = watching.simulation.peers["headstrong"].id
    refused = [f for f in watching.named("validator.turned_down") if f["failed"] == "version"]
    assert {f["worker"] for f in refused} == {headstrong}
    since = watching.named("run.version_in_force", "trainer")[0]["step"]
    accepted = {
        f["step"] for f in verdicts if f["worker"] == headstrong and f["outcome"] == "accepted"
    }
    assert any(step >= since for step in accepted), "it goes on, once its version is in force"


async def test_workers_ask_the_environment_peers_of_their_steps_version() -> None:
    """Validators accept the turns of no others: those of a newly added peer would get an honest
    worker evicted. A removed trusted peer ends with a sentence."""
    async with watched() as watching:
        simulation = watching.simulation
        ids = [simulation.identity(f"environment-{n}").peer_id for n in range(3)]
        first = await watching.start(
            "validator", "trainer", "environment-0", "environment-1", "inference-0",
            environments=[msgspec.structs.replace(SIMULATED, where="served")],
            environment_peers=["environment-0", "environment-1"],
        )  # fmt: skip
        await watching.step_trained(0)
        worker = watching.part("inference-0")
        order = worker.step_order()
        pending = PendingSubmission(
            order=order, envelope=None, asked=submission_order(), entry=b"", since=0.0
        )
        turns = ServedTurns(worker)
        assert set(turns._ranked(pending)) == set(ids[:2])
        added = TrustedKey(peer=ids[2], from_version=2)
        simulation.disturbed = 1  # peers may end
        for version, named in ((2, [*first.environment_peers, added]), (3, [added])):
            message = msgspec.structs.replace(first, version=version, environment_peers=named)
            watching.part("validator").gossip.publish(signed(simulation, message))
            await trio.sleep(1.0)
            assert worker.run.manifest.version == version
            if version == 2:
                assert set(turns._ranked(pending)) == set(ids[:2])
        with pytest.raises(Unwanted, match="removed all environment peers"):
            turns._ranked(pending)
        last = msgspec.structs.replace(first, version=4, validators=[added], environment_peers=[])
        watching.part("trainer").gossip.publish(signed(simulation, last))
        await trio.sleep(1.0)
        for name, role, field, version in (
            ("environment-0", "environment", "environment_peers", 3),
            ("environment-1", "environment", "environment_peers", 3),
            ("validator", "validator", "validators", 4),
        ):
            peer = simulation.peers[name]
            assert peer.ended == (
                f"version {version} of run {worker.run.id} no longer names this peer, {peer.id}, "
                f"for the role {role}; start it without that role, or ask the run's owner to list "
                f"it in the manifest's {field} again"
            )
