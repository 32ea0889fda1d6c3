"""A peer of the matrix, a process in its host's namespace: obeys lines on its standard input.

It is a node as `swarm.peer` opens it, in the network and the DHT, that asks relays like any peer of
a run; instead of a role it has blobs that others fetch and take theirs.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import blake3
import trio

from swarm.errors import PeerError
from swarm.events import Event
from swarm.node.joining import find_run, join_dht, join_network
from swarm.node.local import open_node
from swarm.node.neighbours import Neighbours
from swarm.node.node import Node
from swarm.settings import PeerSettings
from swarm.transport import BlobReference, OpenBlob, Reachability, Source
from swarm.wire.identity import PeerId
from tests.transport.harness import Service, Sink

BLOB_BYTES = 512 * 1024
"""Weights and rollouts of the matrix."""

DIRECT_SECONDS = 15.0
"""How long a relayed connection may take to become direct."""


class Weights(Service):
    """Serves each peer's own blob to anyone, and takes what anyone pushes."""

    def admits(self, peer: PeerId | None, credential: bytes) -> bool:
        return True


def weights(name: str) -> bytes:
    """The blob of a peer: of a fixed size, and like no other's."""
    return (name.encode() + b"#") * (BLOB_BYTES // (len(name) + 1))


def reference(name: str) -> BlobReference:
    data = weights(name)
    return BlobReference(blake3.blake3(data).digest(), len(data))


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def on_event(event: Event) -> None:
    if event.name.startswith(("transport.", "dht.bootstrap")):
        tell(event=event.name, **{key: str(value) for key, value in event.fields.items()})


class Host:
    """What the lines on standard input ask for."""

    def __init__(self, node: Node, name: str) -> None:
        self._node = node
        self._name = name
        self._transport = node.transport

    async def look(self) -> dict[str, Any]:
        """Say how far this peer is."""
        return {
            "peer": self._node.peer_id,
            "addresses": list(self._transport.addresses()),
            "bulk": list(self._transport.bulk_addresses()),
            "reachability": self._transport.reachability().value,
            "reason": self._transport.reachability_reason(),
        }

    async def settle(self) -> dict[str, Any]:
        """Wait until this peer knows how others reach it, and has a relay if it wants one."""
        transport = self._transport
        while transport.reachability() is Reachability.UNKNOWN or (  # noqa: ASYNC110
            transport.wants_relay() and not any("p2p-circuit" in a for a in transport.addresses())
        ):
            await trio.sleep(0.5)
        return await self.look()

    async def meet(self, peer: PeerId, name: str) -> dict[str, Any]:
        """Find a peer in the DHT, connect, fetch its weights, deliver one's own, get direct."""
        began = time.monotonic()
        result: dict[str, Any] = {}
        with self._transport.connection_events() as events:
            try:
                with trio.fail_after(30):
                    await self._node.reach(peer)
                    result["joined_seconds"] = time.monotonic() - began
                    record = await self._node.find_record(peer)
                    source = Source(peer, tuple(record.bulk_addresses) if record else ())
                    wanted = reference(name)
                    piece = await self._transport.fetch(source, wanted, Sink(wanted.size_bytes))
                    result["fetched"] = piece.verify(wanted.digest)
                    await self._transport.push(source, reference(self._name), "weights")
                    result["delivered"] = True
            except (PeerError, trio.TooSlowError) as error:
                result["error"] = str(error) or type(error).__name__
                return result
            was_relayed = False
            with trio.move_on_after(DIRECT_SECONDS):
                async for event in events:
                    if event.peer == peer and event.connected:
                        if not event.relayed:
                            result["path"] = "direct" if not was_relayed else "punched"
                            result["direct_seconds"] = time.monotonic() - began
                            return result
                        was_relayed = True
        result["path"] = "relayed"
        return result

    async def part(self, peer: PeerId) -> dict[str, Any]:
        """Forget a peer."""
        await self._transport.disconnect(peer)
        return {}


async def obey(node: Node, name: str) -> None:
    host = Host(node, name)

    async def answer(line: str) -> None:
        request = json.loads(line)
        result = await getattr(host, request.pop("do"))(**request.get("with", {}))
        tell(answer=request["id"], **result)

    async with trio.open_nursery() as nursery:
        reader = trio.wrap_file(sys.stdin)
        async for line in reader:
            nursery.start_soon(answer, line)
        nursery.cancel_scope.cancel()


async def main(settings: PeerSettings, name: str) -> None:
    async with open_node(settings, events_sink=on_event) as node, trio.open_nursery() as nursery:
        await node.disk.write("weights", weights(name))
        service = Weights()
        own = reference(name)
        service.blobs[own.digest] = OpenBlob("weights", 0, own.size_bytes)
        node.transport.serve_bulk(service)
        if settings.bootstrap:
            entry_points = await join_network(node)
            run = await find_run(node, entry_points)
            await join_dht(node, entry_points)
            neighbours = Neighbours(node, run)
            for peer in entry_points:
                await node.find_record(peer)
            nursery.start_soon(neighbours.be_reachable)
        nursery.start_soon(node.publish_record)
        tell(ready=True)
        await obey(node, name)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    folder, name, given = sys.argv[1:]
    trio.run(main, PeerSettings.model_validate_json(given), name)
