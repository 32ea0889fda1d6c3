"""Streams of the messenger: kept while they are used, ended when they are not, lost at any time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from swarm.wire.messages import AdmissionRequest
from swarm.wire.messenger import LINE_SECONDS
from tests.network.harness import Member, identity, manifest, running, sealed_manifest

OWNER, TRAINER = identity(1), identity(2)


async def ask(asking: Member, other: Member) -> None:
    """Ask what nobody handles here: the reply is empty."""
    await asking.reach(other.id)
    request = await asking.seal(AdmissionRequest(roles=["inference"]), 600.0)
    assert await asking.messenger.request(other.id, request) == []


@pytest.mark.parametrize("asleep_seconds", [LINE_SECONDS, 75.0, 3600.0])
def test_a_peer_outlives_connections_that_end_while_its_machine_sleeps(
    asleep_seconds: float,
) -> None:
    """A laptop that wakes up finds its streams old and their connections gone, all at once."""
    clock = trio.testing.MockClock(autojump_threshold=0)

    async def main() -> None:
        async with running(sealed_manifest(OWNER, manifest([TRAINER], []))) as run:
            laptop = await run.add(identity(3))
            others = [await run.add(identity(number)) for number in range(4, 10)]
            for _ in range(3):
                for other in others:
                    await ask(laptop, other)
                for other in others:
                    run.network.drop(laptop.id, other.id, "the connection was lost")
                clock.jump(asleep_seconds)
                await trio.sleep(LINE_SECONDS)

    trio.run(main, clock=clock)
