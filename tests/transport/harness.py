"""What transport tests need: a world, a disk, a bulk service, every network behind one face."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import blake3
import trio
import trio.testing

from simnet.clock import run_virtual
from simnet.network import SimulatedNetwork
from swarm.transport import BlobReference, OpenBlob, Refused, Transport
from swarm.transport.libp2p import open_libp2p
from swarm.wire.identity import Identity, PeerId
from swarm.world import Piece
from swarm.world.disk import LocalPiece
from tests.worlds import VirtualWorld

ALICE, BOB, CAROL, MALLORY = (Identity(bytes([n]) * 32) for n in range(1, 5))


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test with real sockets, for 30 s at most."""

    async def bounded() -> None:
        with trio.fail_after(30):
            await main()

    trio.run(bounded)


class Sink:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.data = bytearray()
        self.abandoned = False
        self.committed = False

    def write(self, data: bytes | memoryview) -> None:
        if len(self.data) + len(data) > self.size_bytes:
            raise ValueError("more than the sink holds")
        self.data += data

    def finish(self) -> Piece:
        return LocalPiece(len(self.data), blake3.blake3(self.data).digest())

    async def commit(self, piece: Piece) -> None:
        self.committed = True

    def abandon(self) -> None:
        self.abandoned = True


_Partial: Any = object
"""Base of a double that lacks what no test asks of it: mypy lets it stand for the whole."""


class FolderDisk(_Partial):
    """As much of a Disk as a transport asks for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    async def read(self, path: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        with (self.root / path).open("rb") as file:
            file.seek(offset)
            return file.read(size_bytes)

    def exists(self, path: str) -> bool:
        return self.local_path(path).exists()

    def size_bytes(self, path: str) -> int:
        return (self.root / path).stat().st_size

    def local_path(self, path: str) -> Path:
        return self.root / path

    def put(self, path: str, data: bytes) -> BlobReference:
        (self.root / path).write_bytes(data)
        return BlobReference(blake3.blake3(data).digest(), len(data))


class Service:
    """A bulk service that tells what it was asked."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, OpenBlob] = {}
        self.admitted: set[PeerId | None] = {None, ALICE.peer_id, BOB.peer_id}
        self.asked: list[tuple[PeerId | None, bytes]] = []
        self.clients: list[PeerId | None] = []
        self.sinks: list[Sink] = []
        self.released = 0
        self.quota = 10 << 20

    def offer(
        self, disk: FolderDisk, data: bytes, path: str = "blob", pad: int = 0
    ) -> BlobReference:
        """Serve `data`, kept `pad` bytes into a file."""
        disk.put(path, b"#" * pad + data + b"#" * pad)
        digest = blake3.blake3(data).digest()
        self.blobs[digest] = OpenBlob(path, pad, len(data), self._release)
        return BlobReference(digest, len(data))

    def _release(self) -> None:
        self.released += 1

    def admits(self, peer: PeerId | None, credential: bytes) -> bool:
        self.asked.append((peer, credential))
        return peer in self.admitted

    def open(self, client: PeerId | None, digest: bytes) -> OpenBlob:
        self.clients.append(client)
        if digest not in self.blobs:
            raise Refused(404, "no such blob here")
        return self.blobs[digest]

    def accept(self, client: PeerId | None, reference: BlobReference) -> Sink:
        self.clients.append(client)
        if reference.size_bytes > self.quota:
            raise Refused(413, "over the quota")
        self.sinks.append(Sink(reference.size_bytes))
        return self.sinks[-1]

    @property
    def pushed(self) -> dict[bytes, bytes]:
        """The blobs that were committed, by digest."""
        return {
            blake3.blake3(sink.data).digest(): bytes(sink.data)
            for sink in self.sinks
            if sink.committed
        }


class Peer:
    """A transport with its disk."""

    def __init__(self, transport: Transport, disk: FolderDisk) -> None:
        self.transport = transport
        self.disk = disk
        self.id = transport.peer_id


class Network:
    """One face for all implementations."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self.simulated = SimulatedNetwork(seed=1)

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """In virtual time; on libp2p fifteen seconds at most."""

        async def simulated() -> None:
            async with self.simulated.running():
                await main()

        if self.kind == "simulated":
            run_virtual(simulated, seed=1, limit_seconds=3600)
            return

        async def bounded() -> None:
            with trio.fail_after(15):
                await main()

        trio.run(bounded)

    @asynccontextmanager
    async def peer(self, identity: Identity) -> AsyncIterator[Peer]:
        disk = FolderDisk(self._folder / identity.peer_id)
        opened: AbstractAsyncContextManager[Transport]
        async with contextlib.AsyncExitStack() as stack:
            if self.kind == "simulated":
                opened = self.simulated.transport(identity, world=VirtualWorld(), disk=disk)
            else:
                listen = ["/ip4/127.0.0.1/tcp/0"]
                opened = open_libp2p(identity, listen, world=VirtualWorld(), disk=disk)
            yield Peer(await stack.enter_async_context(opened), disk)

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[Peer, Peer]]:
        """Alice connected to Bob."""
        async with self.peer(ALICE) as alice, self.peer(BOB) as bob:
            await alice.transport.connect(bob.id, bob.transport.addresses())
            yield alice, bob
