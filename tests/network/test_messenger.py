"""Streams of the messenger: kept while they are used, ended when they are not, lost at any time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from swarm.wire.envelope import SENDER_RATE_BURST, SENDER_RATE_PER_SECOND
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
                    run.network.drop(laptop.id, other.id)
                clock.jump(asleep_seconds)
                await trio.sleep(LINE_SECONDS)

    trio.run(main, clock=clock)


def test_requests_without_end_are_read_at_a_peers_rate_whatever_their_answer() -> None:
    """An empty reply at once would be followed by the next request at once."""
    seconds = 30.0
    replied = 0

    async def main() -> None:
        async with running(sealed_manifest(OWNER, manifest([TRAINER], []))) as run:
            flood, other = await run.add(identity(3)), await run.add(identity(4))
            await flood.reach(other.id)
            request = await flood.seal(AdmissionRequest(roles=["inference"]), 600.0)

            async def ask_again() -> None:
                nonlocal replied
                while replied < 10_000:
                    await flood.messenger.request(other.id, request)
                    replied += 1

            with trio.move_on_after(seconds):
                async with trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(ask_again)
            await ask(await run.add(identity(5)), other)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    most = SENDER_RATE_BURST + seconds * SENDER_RATE_PER_SECOND
    assert 0.8 * most < replied <= most + 4
