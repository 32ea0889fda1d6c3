"""A peer in a process of its own that fetches one checkpoint: `… HOME`, told the rest on stdin.

Its files, sockets and the child that applies deltas are real. It prints what happens as JSON lines
and stands still after each until it reads one, so that whoever started it can kill it there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import trio

from swarm.shardcast import chain
from swarm.shardcast.held import Change, Held
from swarm.transport import Source
from swarm.wire.identity import PeerId
from swarm.wire.messages import Checkpoint
from swarm.world.compute import LocalCompute
from tests.shardcast.harness import real_peer


class Errand(msgspec.Struct):
    """What it is to fetch, and from whom."""

    checkpoint: Checkpoint
    peer: str
    addresses: list[str]
    bulk_addresses: list[str]
    delta_bytes_per_call: int


def say(what: str, **facts: Any) -> None:
    print(json.dumps({"what": what, **facts}), flush=True)
    if not sys.stdin.buffer.readline():
        os._exit(1)  # whoever started it is gone


async def main(home: Path, errand: Errand) -> None:
    chain.DELTA_BYTES_PER_CALL = errand.delta_bytes_per_call
    async with real_peer(2, home, compute=LocalCompute()) as me:
        for event in me.events.named("shardcast.checkpoint_found"):
            say("found", **event.fields)

        def watch(change: Change, held: Held, index: int) -> None:
            say(change.value, step=held.key[1], delta=held.is_delta, piece=index)

        me.store.watch(watch)
        source = Source(PeerId(errand.peer), tuple(errand.bulk_addresses))
        await me.transport.connect(PeerId(errand.peer), errand.addresses)
        with trio.fail_after(60):
            await me.fetcher.fetch(errand.checkpoint, lambda: [source])
        for event in me.events.named("shardcast.delta_applied"):
            say("applied", **event.fields)
        say("done")


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), msgspec.json.decode(sys.stdin.buffer.readline(), type=Errand))
