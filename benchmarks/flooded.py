"""Verdicts of a real swarm beside a flood of strangers at its validator.

    python -m benchmarks.flooded sockets
    python -m benchmarks.flooded status --rounds 5 --seconds 20 --json status.json
    python -m benchmarks.flooded pipelined

Prints one JSON object. Six processes (bootstrap, relay, trainer, validator, two inference peers)
train the demo's tiny model. Periods without and with the flood alternate, so that a machine that
gets slower counts for both; `pace_kept` is the share of the verdicts per second that is left. The
processor time of the validator's network process and of the flood itself stands beside.

    sockets  512 connections to the piece port from eight addresses, on which no byte is sent; each
             that is closed is opened again after a second
    status   eight identities ask for the ledger's status as fast as they are answered
    pipelined  the same without waiting for an answer: each opens sixteen streams at once, sends 32
             requests on each, resets it and opens the next

The flood runs in this process, on the machine of the swarm, where it takes processor time that a
real one would take elsewhere. So trainer and workers, who use up all they can get, have all cores
but the last; the flood, the validator and the other peers share that one, which they do not fill.
What the flood then costs the swarm is what the validator spends on it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import trio

from benchmarks.common import at_least
from benchmarks.real_swarm import processor_seconds, running_swarm
from swarm.ledger import wire
from swarm.terminal.output import print_json, write_json
from swarm.transport import ConnectError, Stream, StreamError, Transport
from swarm.transport.libp2p import open_libp2p
from swarm.wire.identity import Identity
from swarm.world.disk import LocalDisk
from swarm.world.machine import Machine
from tests.end_to_end.harness import Peer, Swarm

NAMES = ["bootstrap", "relay", "trainer", "validator", "inference-1", "inference-2"]
STEPS = 1_000_000
"""More steps than the benchmark can make."""
START_SECONDS = 120.0
"""Time limit for the first steps."""
CONNECTIONS, ADDRESSES, IDENTITIES = 512, 8, 8
REQUEST = wire.encoder.encode(wire.StatusRequest())
STREAMS, REQUESTS = 16, 32
"""Of each identity at once, and sent on each without waiting for an answer."""
AGAIN_SECONDS = 1.0
"""Before a connection that was closed is opened again."""


@dataclass
class Flood:
    """Strangers at one peer, and how often they were answered or let in."""

    victim: Peer
    count: int = 0

    async def sockets(self) -> None:
        port = int(self.victim.command[self.victim.command.index("--bulk-port") + 1])

        async def hold(source: str) -> None:
            while True:
                try:
                    stream = await trio.open_tcp_stream("127.0.0.1", port, local_address=source)
                    self.count += 1
                    async with stream:
                        await stream.receive_some()
                except (OSError, trio.BrokenResourceError):
                    pass  # it is full, or the connection made way
                await trio.sleep(AGAIN_SECONDS)

        async with trio.open_nursery() as nursery:
            for number in range(CONNECTIONS):
                nursery.start_soon(hold, f"127.0.{1 + number % ADDRESSES}.1")

    async def status(self) -> None:
        async def ask(stream: Stream) -> None:
            while True:
                await stream.send(REQUEST)
                await stream.receive()
                self.count += 1

        await self._identities(ask, 1)

    async def pipelined(self) -> None:
        async def ask(stream: Stream) -> None:
            for _ in range(REQUESTS):
                await stream.send(REQUEST)
                self.count += 1
            await stream.reset()

        await self._identities(ask, STREAMS)

    async def _identities(self, ask: Callable[[Stream], Awaitable[None]], streams: int) -> None:
        """Let each identity ask on so many streams at once, each again and again."""
        peer = self.victim.identity.peer_id

        async def ask_again(transport: Transport) -> None:
            while True:
                try:
                    await transport.connect(peer, [self.victim.multiaddr])
                    await ask(await transport.open_stream(peer, wire.PROTOCOL))
                except ConnectError:
                    await trio.sleep(AGAIN_SECONDS)
                except StreamError:
                    pass  # it was reset: the next one at once

        async def be(key: Identity, folder: Path) -> None:
            async with (
                open_libp2p(key, [], world=Machine(), disk=LocalDisk(folder)) as transport,
                trio.open_nursery() as nursery,
            ):
                for _ in range(streams):
                    nursery.start_soon(ask_again, transport)

        with tempfile.TemporaryDirectory(prefix="swarm-flood-") as name:
            async with trio.open_nursery() as nursery:
                for number in range(IDENTITIES):
                    folder = Path(name) / str(number)
                    nursery.start_soon(be, Identity(bytes([200 + number]) * 32), folder)


@dataclass(frozen=True)
class Period:
    """What one period had, for each of its seconds."""

    verdicts: float
    validator_cpu: float
    """Processor seconds of the validator's network process."""
    flood_cpu: float
    """Processor seconds of this process, which makes the flood."""


def keep_apart(peers: Swarm) -> None:
    """Give the last core to this process and to all peers but the trainer and the workers."""
    *others, last = sorted(os.sched_getaffinity(0))
    for peer in peers.peers.values():
        busy = peer.role in ("trainer", "inference") and others
        for process in (peer.pid, *peer.children().values()):
            for thread in Path(f"/proc/{process}/task").iterdir():
                os.sched_setaffinity(int(thread.name), others if busy else [last])
    os.sched_setaffinity(0, [last])


async def observed(validator: Peer, seconds: float) -> Period:
    began, own, spent = time.monotonic(), time.process_time(), processor_seconds(validator.pid)
    before = len(validator.heard("validator.verdict"))
    await trio.sleep(seconds)
    heard = len(validator.heard("validator.verdict")) - before
    spent, own = processor_seconds(validator.pid) - spent, time.process_time() - own
    passed = time.monotonic() - began
    return Period(*(round(each / passed, 3) for each in (heard, spent, own)))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    quiet: list[Period] = []
    flooded: list[Period] = []
    async with running_swarm(STEPS, NAMES) as peers:
        trainer, validator = peers["trainer"], peers["validator"]
        await trainer.says("trainer.checkpoint_published", step=3, seconds=START_SECONDS)
        keep_apart(peers)
        flood = Flood(validator)
        act: Callable[[], Awaitable[None]] = getattr(flood, options.flood)
        for number in range(options.rounds):
            quiet.append(await observed(validator, options.seconds))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(act)
                await trio.sleep(2)  # until the flood is there
                flooded.append(await observed(validator, options.seconds))
                nursery.cancel_scope.cancel()
            print(f"round {number + 1}: {quiet[-1]} without, {flooded[-1]} with", file=sys.stderr)
            await trio.sleep(2)  # until it is gone
    without, beside = (statistics.median(p.verdicts for p in some) for some in (quiet, flooded))
    return {
        "flood": options.flood,
        "count": flood.count,
        "seconds": options.seconds,
        "without": [asdict(each) for each in quiet],
        "with": [asdict(each) for each in flooded],
        "pace_kept": round(beside / max(without, 1e-9), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("flood", choices=["sockets", "status", "pipelined"])
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--seconds", type=at_least(1), default=15, help="of each period")
    parser.add_argument("--json", type=Path, help="file to write the report to as well")
    options = parser.parse_args()
    report = trio.run(measure, options)
    if options.json is not None:
        write_json("--json", report, options.json)
    print_json(report)


if __name__ == "__main__":
    main()
