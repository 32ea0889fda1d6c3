"""A relay's limits: what it carries, what it says when one is reached, and to whom."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
import trio.testing

from swarm.events import Event, Events
from swarm.identity import Identity
from swarm.transport import ConnectError, StreamError
from swarm.transport.libp2p.circuits import CircuitLimits, Circuits
from swarm.transport.libp2p.notices import PROTOCOL as NOTICE_PROTOCOL
from tests.network.harness import identity
from tests.transport.harness import ALICE, BOB, CAROL, MALLORY
from tests.transport.test_libp2p_security import ECHO, Peers, echo, plaintext_host, run
from tests.worlds import VirtualWorld


class Relayed:
    """Bob behind Carol's relay, and the events of all three."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.events: dict[str, list[Event]] = {}

    async def open(self, key: Identity, listen: Any = (), **options: Any) -> Any:
        events = Events(VirtualWorld(), key.peer_id)
        events.add_sink(self.events.setdefault(key.peer_id, []).append)
        peer = await self._peers.open(key, listen, events=events, **options)
        peer.serve(ECHO, echo)
        return peer

    async def start(self, limits: CircuitLimits) -> tuple[Any, str]:
        """Bob and his address."""
        self.relay = await self.open(
            CAROL, ["/ip4/127.0.0.1/tcp/0"], relay=True, circuit_limits=limits
        )
        bob = await self.open(BOB)
        await bob.use_relay(CAROL.peer_id, self.relay.addresses())
        return bob, bob.addresses()[-1]

    async def heard(self, key: Identity, name: str) -> Event:
        """The first event of a name, once it has come."""
        with trio.fail_after(8):
            while True:
                for event in self.events[key.peer_id]:
                    if event.name == name:
                        return event
                await trio.sleep(0.02)


def test_a_circuit_ends_after_its_bytes_and_both_peers_learn_why(tmp_path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            net = Relayed(Peers(stack, tmp_path))
            _, address = await net.start(CircuitLimits(circuit_bytes=300_000))
            alice = await net.open(ALICE)
            await alice.connect(BOB.peer_id, [address])
            stream = await alice.open_stream(BOB.peer_id, ECHO)
            with pytest.raises(StreamError):
                for _ in range(10):
                    await stream.send(bytes(100_000))
                    assert await stream.receive() == bytes(100_000)
            told = await net.heard(ALICE, "transport.relay_limit")
            assert told.fields["relay"] == CAROL.peer_id and told.fields["remote"] == BOB.peer_id
            assert "bytes" in told.fields["reason"]
            assert (await net.heard(BOB, "transport.relay_limit")).fields["remote"] == ALICE.peer_id
            assert (await net.heard(CAROL, "relay.limit_reached")).fields["limit"] == "bytes"
            await alice.connect(BOB.peer_id, [address])  # a new circuit has a new allowance

    run(main)


def test_a_circuit_ends_after_its_time(tmp_path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            net = Relayed(Peers(stack, tmp_path))
            _, address = await net.start(CircuitLimits(circuit_seconds=1))
            alice = await net.open(ALICE)
            await alice.connect(BOB.peer_id, [address])
            assert (
                "open long enough"
                in (await net.heard(ALICE, "transport.relay_limit")).fields["reason"]
            )

    run(main)


def test_one_circuit_ends_without_the_others_and_frees_its_place(tmp_path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            net = Relayed(Peers(stack, tmp_path))
            _, address = await net.start(CircuitLimits(circuits_per_peer=2))
            first, second, third = [await net.open(identity(n)) for n in (21, 22, 23)]
            await first.connect(BOB.peer_id, [address])
            await second.connect(BOB.peer_id, [address])
            with pytest.raises(ConnectError, match="resource limit exceeded"):
                await third.connect(BOB.peer_id, [address])
            assert (await net.heard(CAROL, "relay.limit_reached")).fields["limit"] == (
                "circuits per peer"
            )
            stream = await second.open_stream(BOB.peer_id, ECHO)
            await first.disconnect(BOB.peer_id)
            with trio.fail_after(5):
                while BOB.peer_id not in third.connected():
                    try:
                        await third.connect(BOB.peer_id, [address])
                    except ConnectError:
                        await trio.sleep(0.05)
            await stream.send(b"still here")
            assert await stream.receive() == b"still here"

    run(main)


class Carried:
    """One end of a circuit as libp2p's streams have it, in memory."""

    def __init__(self, stream: Any) -> None:
        self.read, self.write = stream.receive_some, stream.send_all


def test_all_circuits_together_keep_to_the_rate() -> None:
    async def main() -> None:
        limits = CircuitLimits(bytes_per_second=400_000)
        relay = Circuits(plaintext_host(CAROL), limits, None, allow_hop=True)

        async def send(size_bytes: int) -> None:
            alice, near = trio.testing.memory_stream_pair()
            bob, far = trio.testing.memory_stream_pair()
            nursery.start_soon(relay.carry, Carried(near), Carried(far))
            await alice.send_all(bytes(size_bytes))
            while size_bytes:
                size_bytes -= len(await bob.receive_some())

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as sending:
                for _ in range(2):
                    sending.start_soon(send, 300_000)
            nursery.cancel_scope.cancel()
        # 600 kB, of which 200 kB at once.
        assert trio.current_time() - began == pytest.approx(1.0)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_stranger_s_notice_is_not_reported(tmp_path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            net = Relayed(Peers(stack, tmp_path))
            alice = await net.open(ALICE, ["/ip4/127.0.0.1/tcp/0"])
            mallory = await net.open(MALLORY)
            await mallory.connect(ALICE.peer_id, alice.addresses())
            await mallory.notices._send(ALICE.peer_id, _notice(BOB.peer_id, "bytes"))
            stream = await mallory.open_stream(ALICE.peer_id, NOTICE_PROTOCOL)
            await stream.send(b"nonsense")
            with pytest.raises(StreamError):
                await stream.receive()
            assert not any(e.name.startswith("transport.relay") for e in net.events[ALICE.peer_id])

    run(main)


def _notice(other: str, limit: str) -> Any:
    from swarm.transport.libp2p.notices import Notice

    return Notice(other, limit)
