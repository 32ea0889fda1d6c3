"""A trusted peer that more peers turn to than it holds connections."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import pytest
import trio

from simnet.clock import run_virtual
from simnet.disk import SimulatedDisk
from simnet.lines import Weather
from simnet.network import SimulatedNetwork
from simnet.transport import SimulatedTransport
from simnet.world import SimulatedWorld
from swarm.run.lease import HEARTBEAT_SECONDS
from swarm.transport import limits
from swarm.wire.envelope import Envelope
from swarm.wire.identity import Identity
from swarm.wire.messages import Heartbeat
from swarm.wire.messenger import LINE_SECONDS
from tests.network.harness import Member, TestRun, identity, manifest, sealed_manifest

RUNNER = partial(run_virtual, seed=1)

OWNER, TRAINER, VALIDATOR = (identity(n) for n in range(1, 4))
MANIFEST = sealed_manifest(OWNER, manifest([TRAINER], [VALIDATOR]))
HELD, WORKERS = 4, 12


async def answer(envelope: Envelope, supporting: Sequence[Envelope]) -> Sequence[Envelope]:
    return [envelope]


async def test_whoever_asks_now_and_then_leaves_its_connection_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three times as many workers as connections all get their answers, and the one that asks most
    often, as with heartbeats, never has to connect again."""
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", HELD)

    async with AsyncExitStack() as stack:
        network = SimulatedNetwork(1, Weather(jitter=0.0, loss=0.0))
        await stack.enter_async_context(network.running())
        nursery = await stack.enter_async_context(trio.open_nursery())
        run = TestRun(MANIFEST, nursery)

        async def add(key: Identity, number: int) -> Member:
            transport: SimulatedTransport = await stack.enter_async_context(
                network.transport(
                    key,
                    world=SimulatedWorld(1, str(number)),
                    disk=SimulatedDisk(str(number)),
                )
            )
            member = Member(run, key, transport, (), number)
            run.addresses[key.peer_id] = transport.addresses()
            await nursery.start(member.messenger.run)
            return member

        validator = await add(VALIDATOR, 0)
        validator.transport.keep_many()
        await stack.enter_async_context(validator.messenger.answering({Heartbeat: answer}))
        workers = [await add(identity(100 + n), 1 + n) for n in range(WORKERS)]
        for worker in workers:
            validator.transport.vouch(worker.id, 1e6)

        async def ask(worker: Member) -> None:
            await worker.reach(VALIDATOR.peer_id)
            request = await worker.seal(worker.describe(), 60.0)
            assert await worker.messenger.request(VALIDATOR.peer_id, request)

        async def beat(worker: Member) -> None:
            while True:
                await ask(worker)
                await trio.sleep(HEARTBEAT_SECONDS)

        events = workers[0].transport.connection_events()
        nursery.start_soon(beat, workers[0])
        for worker in workers[1:] * 2:
            await ask(worker)
            await trio.sleep(LINE_SECONDS)
            assert len(validator.transport.connected()) <= HELD
        assert (await events.receive()).connected
        with pytest.raises(trio.WouldBlock):
            events.receive_nowait()
        nursery.cancel_scope.cancel()
