"""A broadcast between real processes on loopback, with limited uplinks, against its bound.

    python -m benchmarks.loopback
    python -m benchmarks.loopback --mib 256 --uplinks 160,160,160,40,40,40,40,40,40

Prints one JSON object. One source, two relays and six peers run, each a process with libp2p and the
HTTP piece plane, whose uplink is limited as by `--uplink-mbps`. Every process may fetch from every
other process. Each runs a peer's checkpoint code, assembled as in `swarm.node`: it measures its
uplink and answers "busy" when the uplink is full. The bound for N receivers of F bytes is
max(F / u_source, N·F / Σu): no receiver finishes before the source has sent everything once, nor do
all before the uplinks together have sent it N times. `ratio` is the last receiver's time divided by
the bound, `ratio_median` the median receiver's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import trio

from benchmarks.common import at_least, several
from benchmarks.transfer import FILE, Process, checkpoint_of, cpu_seconds, say, started
from swarm.events import Events
from swarm.shardcast.fetch.fetcher import Fetcher
from swarm.shardcast.have.streams import HaveExchange
from swarm.shardcast.service import BlobService
from swarm.shardcast.store import CheckpointStore
from swarm.shardcast.uploads import Uploads
from swarm.terminal.output import print_json
from swarm.transport import Source
from swarm.transport.libp2p import open_libp2p
from swarm.wire.identity import Identity
from swarm.world.disk import LocalDisk
from swarm.world.machine import Machine

RUN = "benchmark/loopback"
UPLINKS = "160,160,160,40,40,40,40,40,40"


async def peer(number: int, folder: Path, uplink_mbps: float) -> None:
    """Run one process: the source if its folder holds `made`, else a receiver."""
    world, disk = Machine(), LocalDisk(folder)
    identity = Identity(number.to_bytes(32, "big"))
    async with open_libp2p(
        identity,
        ["/ip4/127.0.0.1/tcp/0"],
        world=world,
        disk=disk,
        uplink_bytes_per_second=uplink_mbps * 1e6 / 8,
    ) as transport:
        events = Events(world, identity.peer_id)
        store = CheckpointStore(disk, RUN, events)
        uploads = Uploads(world, transport, store)
        # Without `meet`: all processes are connected to each other.
        have = HaveExchange(world, transport, store, events, uploads=uploads)
        fetcher = Fetcher(world, transport, store, events, have=have)
        transport.serve_bulk(
            BlobService(lambda peer, credential: True, store=store, uploads=uploads)
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(have.run)
            say(
                ready=True,
                peer=identity.peer_id,
                addresses=list(transport.addresses()),
                roots=list(transport.bulk_addresses()),
            )
            others = json.loads(await hear())
            for other in others:
                await transport.connect(other["peer"], other["addresses"])
            if disk.exists("made"):
                held = await store.publish("made", 0, 0)
                say(digest=held.digest.hex(), manifest_bytes=held.manifest_bytes)
                await hear()
            else:
                say(ready=True)
                order = json.loads(await hear())
                checkpoint = checkpoint_of(order)
                sources = [
                    Source(each["peer"], tuple(each["roots"]))
                    for each in order["peers"]
                    if each["peer"] != identity.peer_id
                ]
                began = time.perf_counter()
                await fetcher.fetch(checkpoint, lambda: sources)
                say(seconds=time.perf_counter() - began)
                await hear()  # keeps serving
            nursery.cancel_scope.cancel()


async def hear() -> str:
    return await trio.to_thread.run_sync(sys.stdin.readline)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=at_least(1), default=128)
    parser.add_argument(
        "--uplinks",
        type=several(float, least=2),
        default=UPLINKS,
        help="Mb/s of source, relays, peers (default %(default)s)",
    )
    parser.add_argument("--be", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    uplinks = arguments.uplinks
    if arguments.be is not None:
        trio.run(peer, arguments.be, arguments.folder, uplinks[arguments.be])
        return
    with tempfile.TemporaryDirectory(prefix="loopback-") as name, ExitStack() as stack:
        made = Path(name) / "0/made"
        made.mkdir(parents=True)
        (made / FILE).write_bytes(np.random.default_rng(0).bytes(arguments.mib << 20))
        processes = [
            stack.enter_context(
                started(
                    ["--be", str(index), "--uplinks", ",".join(map(str, uplinks))],
                    Path(name) / str(index),
                    module="benchmarks.loopback",
                )
            )
            for index in range(len(uplinks))
        ]
        print_json(broadcast(processes, uplinks, arguments.mib << 20))


def broadcast(processes: list[Process], uplinks: list[float], size: int) -> dict[str, Any]:
    everybody = [process.told for process in processes]
    published: dict[str, Any] = {}
    for number, process in enumerate(processes):
        process.tell(everybody[:number])  # each pair connects once
        published = published or process.hear()
        if number:
            process.hear()
    before = sum(map(cpu_seconds, processes))
    for process in processes[1:]:
        process.tell({**published, "peers": everybody})
    seconds = [process.hear()["seconds"] for process in processes[1:]]
    cpu = sum(map(cpu_seconds, processes)) - before
    rates = [mbps * 1e6 / 8 for mbps in uplinks]
    receivers = len(seconds)
    terms = {"source uplink": size / rates[0], "all uplinks": receivers * size / sum(rates)}
    bound = max(terms.values())
    return {
        "bytes": size,
        "uplinks_mbps": uplinks,
        "bound_seconds": round(bound, 3),
        "binding_term": max(terms, key=lambda term: terms[term]),
        "seconds": [round(each, 3) for each in seconds],
        "ratio": round(max(seconds) / bound, 3),
        "ratio_median": round(statistics.median(seconds) / bound, 3),
        "cpu_seconds_per_gb": round(cpu / (receivers * size / 1e9), 2),
    }


if __name__ == "__main__":
    main()
