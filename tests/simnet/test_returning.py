"""Peers find each other again within seconds, while another one is away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.faults import Freeze, befall
from simnet.simulation import Plan, Simulation
from tests.simnet.runs import going

RUNNER = partial(run_virtual, seed=5)
SOON_SECONDS = 15.0
QUICK = Hardware(step_seconds=1.0)


@asynccontextmanager
async def going_well() -> AsyncIterator[Simulation]:
    """A run of one peer of each role."""
    simulation = Simulation(5, workload=Workload(model_bytes=3_000_000, completion_tokens_mean=64))
    stepping = simulation.expect("trainer.step_trained", ["trainer"])
    names = ["validator", "trainer", "relay", "inference"]
    async with going(simulation, *(Plan(name, [name], hardware=QUICK) for name in names)):
        assert await simulation.meet(stepping, 120)
        await trio.sleep(15)  # for what is written now and then
        yield simulation


async def test_a_peer_returns_while_its_bootstrap_peer_is_away() -> None:
    async with going_well() as simulation:
        await simulation.peers["bootstrap"].kill()
        for name in ["validator", "relay", "inference", "trainer"]:
            await simulation.peers[name].kill()
            await trio.sleep(2)
            stepping = simulation.expect("trainer.step_trained", ["trainer"])
            await simulation.peers[name].start_again()
            assert await simulation.meet(stepping, SOON_SECONDS), name
    assert simulation.trace.counts["dht.joined_through_others"] == 4


async def test_work_is_delivered_as_soon_as_a_validator_returns() -> None:
    """However long it was away: workers do not wait out their last pause."""
    async with going_well() as simulation:
        validator = simulation.peers["validator"]
        await validator.kill()
        await trio.sleep(50)
        await validator.start_again()
        judged = simulation.expect("validator.verdict", ["validator"])
        assert await simulation.meet(judged, 9.0)


async def test_a_bootstrap_peer_that_returns_finds_those_it_knew() -> None:
    """Whoever joined through it before they found it would be in a network of its own."""
    async with going_well() as simulation:
        bootstrap = simulation.peers["bootstrap"]
        await bootstrap.kill()
        node = await bootstrap.start()
        await trio.sleep(1)
        assert len(node.transport.connected()) == 4


@pytest.mark.slow
async def test_steps_go_on_while_others_hang() -> None:
    """Nobody fetches a policy from them, and no lookup that meets them is waited for."""
    async with going_well() as simulation:
        await simulation.add(Plan("inference-2", ["inference"], hardware=QUICK)).start()
        await trio.sleep(10)
        before = simulation.trace.counts["trainer.step_trained"]
        await trio.sleep(30)
        middle = simulation.trace.counts["trainer.step_trained"]
        hanging = ["relay", "inference", "bootstrap"]
        await befall(simulation, [Freeze(at=simulation.now(), seconds=30, peers=hanging)])
        after = simulation.trace.counts["trainer.step_trained"]
        assert after - middle > 0.4 * (middle - before) > 6


async def test_who_is_given_another_bootstrap_peer_than_last_time_joins_through_no_other() -> None:
    async with going_well() as simulation:
        relay = simulation.peers["relay"]
        await relay.kill()
        simulation.bootstrap[:] = [simulation.bootstrap[0].replace("/tcp/", "/tcp/1")]
        simulation.disturbed += 1
        await relay.start_again()
        await trio.sleep(SOON_SECONDS)
        assert relay.ended is not None and "no bootstrap peer can be reached" in relay.ended
