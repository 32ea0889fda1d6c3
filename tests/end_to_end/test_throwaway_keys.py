"""Thousands of free identities connect to real peers, each with the largest possible record."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import trio

from swarm.gossip.topics import PROTOCOL
from swarm.transport.framing import encode_varint
from swarm.wire.envelope import seal
from swarm.wire.identity import Identity
from swarm.wire.messages import PeerRecord
from tests.end_to_end.harness import (
    START_SECONDS,
    STEP_SECONDS,
    Peer,
    run_as_attacker,
    swarm,
    yield_processor,
)
from tests.transport.hostile import DATA, connected, data, opening

from .test_strangers import VICTIMS, resident_bytes

ROLES = ("bootstrap", "relay", "trainer", "validator", "inference-1")
KEYS = int(os.environ.get("THROWAWAY_KEYS", "40"))
"""Number of keys for each victim that gossips. THROWAWAY_KEYS=4000 repeats the figure in
docs/benchmarks.md."""
AT_ONCE = 8
ANSWER_BYTES_MIN = 100
"""Bytes received that exceed the negotiation: the peer's own hello arrives, so it has read ours."""

GROWTH_BYTES_MAX = 24 << 20


def hello(key: Identity, run: str) -> bytes:
    """Make a neighbour's first message, with a peer record of the largest allowed size."""
    record = PeerRecord(
        roles=["relay"] * 8,
        addresses=["/dns4/" + "x" * 280 for _ in range(16)],
        bulk_addresses=["http://" + "x" * 280 for _ in range(16)],
        agent="x" * 200,
    )
    now = time.time()
    envelope = seal(
        key, record, run="", sequence=int(now * 1000), wall_time=now, lifetime_seconds=3600
    )
    said = msgspec.msgpack.encode(
        ["hello", run, int(now * 1000), ["run", "work"], [envelope.raw], b""]
    )
    return b"\x00" + encode_varint(len(said)) + said


async def call_on(peer: Peer, run: str, number: int) -> None:
    key = Identity(b"throwaway " + number.to_bytes(22, "big"))
    source = f"127.{1 + number // 250 % 250}.{1 + number % 250}.1"
    with trio.move_on_after(5), suppress(Exception):
        async with connected(peer.multiaddr, key, source) as stranger:
            await stranger.send(opening(1, PROTOCOL) + data(1, hello(key, run)))
            answer = b""
            while len(answer) <= ANSWER_BYTES_MIN:
                kind, _, _, body = await stranger.receive()
                answer += body if kind == DATA else b""


async def call_on_again(peer: Peer, run: str, numbers: Iterator[int]) -> None:
    for number in numbers:
        await call_on(peer, run, number)


@pytest.mark.slow
def test_throwaway_keys_leave_nothing_behind(tmp_path: Path, base: Path, fork_server: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, base, fork_server, names=ROLES, steps=100_000) as peers:
            await peers.start()
            trainer = peers["trainer"]
            await trainer.says("trainer.step_trained", step=1, seconds=START_SECONDS + STEP_SECONDS)
            yield_processor()
            for victim in VICTIMS:
                peer = peers[victim]
                before, began = resident_bytes(peer.pid), trio.current_time()
                numbers = iter(range(KEYS))
                async with trio.open_nursery() as nursery:
                    for _ in range(AT_ONCE):
                        nursery.start_soon(call_on_again, peer, peers.run, numbers)
                after = resident_bytes(peer.pid)
                print(
                    f"{victim}: {KEYS} keys in {trio.current_time() - began:.0f} s, resident "
                    f"{before / 2**20:.0f} to {after / 2**20:.0f} MiB"
                )
                assert after - before <= GROWTH_BYTES_MAX
            reached = len(trainer.heard("trainer.step_trained"))
            await trainer.says("trainer.step_trained", step=reached + 2, seconds=STEP_SECONDS)

    run_as_attacker(main)
