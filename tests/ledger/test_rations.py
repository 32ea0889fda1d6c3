"""What others may read of a ledger: counts of answers made, and of bytes given away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import trio
import trio.testing

from swarm.ledger import serving, wire
from swarm.ledger.serving import (
    NETWORK_READS_BURST,
    NETWORK_READS_PER_SECOND,
    READ_BYTES,
    RESERVED_READS_BURST,
    STRANGERS_READS_BURST,
    STRANGERS_READS_PER_SECOND,
    Answers,
    Rations,
)
from swarm.wire.identity import PeerId
from swarm.wire.messages import Heartbeat, Present

ANSWER_BYTES = 200_000
"""About the status of a run with a thousand members."""


class Run:
    """The status of a run, which counts how often an answer is made of it."""

    def __init__(self, members: int) -> None:
        beat = Heartbeat(roles=["inference"], doing="waiting")
        present = [
            Present(peer=f"{n:046d}", heartbeat=beat, age_seconds=1.0, standing="live")
            for n in range(members)
        ]
        self.newest = ([b"manifest"], present)
        self.result = b""
        self.made = 0

    def status(self):
        return self.newest

    def evaluation(self) -> bytes:
        return self.result

    def forks(self):
        self.made += 1
        return ()


def rations(
    admitted: frozenset[str] = frozenset(), network: Callable[[str], str] = lambda peer: ""
) -> Rations:
    return Rations(admits=lambda peer: peer in admitted, network_of=network)


async def ask_on(of: Rations, peer: str, streams: int, asked: Counter[str]) -> None:
    """Ask again at once after each answer and each refusal, on so many streams at once."""

    async def ask() -> None:
        while True:
            given = await read(of, peer, 100)
            asked.update({peer: given, "all": 1})
            assert asked["all"] < 1_000_000, "refused without a wait"

    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(ask)


async def read(of: Rations, peer: str, size_bytes: int = ANSWER_BYTES) -> bool:
    """Ask for one answer; whether it is given."""
    try:
        charged = await of.admit(PeerId(peer), 1)
    except ValueError:
        return False
    of.charge(charged, size_bytes)
    return True


async def flood(of: Rations, peers: list[str], seconds: float) -> dict[str, int]:
    """Let each peer ask again and again; the bytes that each was given."""
    given = dict.fromkeys(peers, 0)

    async def ask(peer: str) -> None:
        while True:
            if await read(of, peer):
                given[peer] += ANSWER_BYTES
            else:
                await trio.sleep(0.5)
            await trio.sleep(0.01)

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(ask, peer)
    return given


@pytest.mark.parametrize("members", [10, 1000])
def test_a_status_is_encoded_once_and_served_to_all_as_bytes(members: int) -> None:
    run = Run(members)
    answers = Answers(run)  # type: ignore[arg-type]
    first = answers.status()
    assert all(answers.status() is first for _ in range(750))
    assert run.made == 1
    assert len(wire.answer_decoder.decode(first).present) == members  # type: ignore[union-attr]


async def test_bytes_are_what_strangers_use_up() -> None:
    """Not requests: 750 answers a second of 200 kB would be 150 MB/s."""
    seconds = 60.0
    given = await flood(rations(), [f"stranger {n}" for n in range(20)], seconds)
    most = STRANGERS_READS_BURST + seconds * STRANGERS_READS_PER_SECOND
    assert 0.5 * most * READ_BYTES < sum(given.values()) <= 1.05 * most * READ_BYTES


async def test_identities_of_one_network_share_what_it_gets() -> None:
    seconds = 60.0
    crowd = [f"crowd {n}" for n in range(20)]
    of = rations(network=lambda peer: "198.51.100.0/24" if peer in crowd else "192.0.2.0/24")
    given = sum((await flood(of, crowd, seconds)).values())
    most = NETWORK_READS_BURST + seconds * NETWORK_READS_PER_SECOND
    assert given <= (1.05 * most + 2 * len(crowd)) * READ_BYTES
    assert NETWORK_READS_PER_SECOND <= STRANGERS_READS_PER_SECOND / 2


async def test_a_stranger_of_another_network_is_answered_while_others_read_all_they_can() -> None:
    """Twenty networks and private addresses take whatever all strangers share."""
    floods = [f"flood {n}" for n in range(40)]
    given: list[bool] = []

    def network(peer: str) -> str:
        if peer == "honest":
            return "203.0.113.0/24"
        number = int(peer.split()[1])
        return f"198.51.{number % 20}.0/24" if number < 30 else ""

    of = rations(network=network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flood, of, floods, 300.0)
        await trio.sleep(40)
        for _ in range(8):
            given.append(await read(of, "honest"))
            await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert all(given), given


@pytest.mark.parametrize("network", ["", "198.51.100.0/24"])
async def test_strangers_cannot_use_up_the_share_of_admitted_peers(network: str) -> None:
    """Also from an admitted peer's own network."""
    of = rations(frozenset(["worker"]), lambda peer: network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flood, of, [f"stranger {n}" for n in range(40)], 300.0)
        await trio.sleep(40)
        began = trio.current_time()
        assert all([await read(of, "worker") for _ in range(20)])
        assert trio.current_time() == began, "without waiting"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("streams", "network"), [(1, ""), (64, ""), (64, "198.51.100.0/24")])
async def test_who_asks_at_once_again_costs_no_more_than_its_ration(
    streams: int, network: str
) -> None:
    """Eight identities that wait for their answers, and the same on all their streams at once.
    An honest reader, of the same network, is answered between them."""
    seconds = 40.0
    asked: Counter[str] = Counter()
    of = rations(network=lambda peer: network)
    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(ask_on, of, f"flood {number}", streams, asked)
        await trio.sleep(seconds / 2)
        for _ in range(10):
            began = trio.current_time()
            assert await read(of, "honest", 100)
            assert trio.current_time() - began < 1
            await trio.sleep(1)
        await trio.sleep(seconds / 2 - 10)
        nursery.cancel_scope.cancel()
    most = STRANGERS_READS_BURST + RESERVED_READS_BURST + seconds * STRANGERS_READS_PER_SECOND
    refused = 8 * streams * seconds / serving.WAIT_SECONDS
    assert asked["all"] <= 1.1 * (most + refused)
    answered = [asked[f"flood {number}"] for number in range(8)]
    assert max(answered) < 1.2 * min(answered), answered


async def test_nobody_waits_longer_than_a_client_does() -> None:
    """Who is far over his rate is refused, but not at once: he would ask at once again."""
    of = rations()
    reads = NETWORK_READS_BURST + (wire.REQUEST_SECONDS + 1) / 2 * NETWORK_READS_PER_SECOND
    assert await read(of, "greedy", int(reads * READ_BYTES))
    began = trio.current_time()
    assert not await read(of, "greedy")
    assert 1 < trio.current_time() - began < wire.REQUEST_SECONDS
    assert await read(of, "other")


async def test_what_is_remembered_of_readers_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(serving, "PEERS_MAX", 16)
    of = rations(network=lambda peer: f"network of {peer}")
    for n in range(100):
        assert await read(of, f"stranger {n}", 10)
    assert of.remembered <= 2 * 3 * 16
