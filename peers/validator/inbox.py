"""What workers push to a validator, from the first byte until its verdict.

Every push lands under a name of its own, is hashed as it comes, and is given its final name, by
worker and digest, only once it is whole and its hash is right. Nothing is ever written to a file
that has its final name: what is judged is what is served afterwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarm.identity import PeerId
from swarm.messages import Limits
from swarm.run.run import Run
from swarm.transport import BlobReference, Refused
from swarm.world import Disk, Piece, Sink, World

FOLDER = "incoming"
UNANNOUNCED_SECONDS = 60.0
"""A file that has arrived whole and that nobody announced is removed after this."""

Key = tuple[str, bytes]
"""(worker, digest). A file belongs to its worker: no other peer's copy or announcement counts."""


def canonical_path_of(key: Key) -> str:
    """The path of a file's rollouts in canonical form once it was inspected."""
    return path_of(key) + ".canonical"


def path_of(key: Key) -> str:
    """The path of a file once it is whole."""
    worker, digest = key
    return f"{FOLDER}/{digest.hex()}-{worker}.parquet"


@dataclass
class _Whole:
    size_bytes: int
    arrived: float
    announced: bool = False


class _Arriving:
    """A push on its way: the disk's sink, which tells the inbox how it ended. The transport ends
    each push that stalls or is too slow, however long it takes otherwise."""

    def __init__(self, sink: Sink, key: Key, path: str, inbox: Inbox) -> None:
        self.key = key
        self.path = path
        self.size_bytes = sink.size_bytes
        self.sink = sink
        self._inbox = inbox

    def write(self, data: bytes | memoryview) -> None:
        self.sink.write(data)

    def finish(self) -> Piece:
        return self.sink.finish()

    async def commit(self, piece: Piece) -> None:
        await self._inbox.receive(self, piece)

    def abandon(self) -> None:
        self.sink.abandon()
        self._inbox.ended(self)


class Inbox:
    """Decides on pushes (`swarm.shardcast.service.PushInbox`), within each worker's quota."""

    def __init__(
        self, run: Run, disk: Disk, world: World, *, judged: Callable[[Key], bool]
    ) -> None:
        """`judged`: whether a file has its verdict, by any validator."""
        self._judged = judged
        self._run = run
        self._disk = disk
        self._world = world
        self._serial = itertools.count()
        self._arriving: dict[_Arriving, None] = {}
        """Pushes that have not ended, or whose remains are still on the disk."""
        self._whole: dict[Key, _Whole] = {}
        """Files that wait to be announced, and then for a verdict."""
        self._ended, self._to_remove = trio.open_memory_channel[_Arriving](math.inf)
        """Unbounded, but never more than were accepted: each counts against its worker's quota
        until it is removed."""

    async def run(self) -> None:
        """Remove what broken pushes left behind, and files that nobody announces."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._remove_unannounced)
            async for push in self._to_remove:
                await self._disk.remove(push.path)
                self._arriving.pop(push, None)

    # --- pushes ------------------------------------------------------------------------------

    def accept(self, client: PeerId | None, reference: BlobReference) -> Sink:
        """A sink for a file that a client pushes; raises `Refused`."""
        limits: Limits = self._run.manifest.limits
        if client is None:
            raise Refused(403, "prove who you are before you push")
        if reference.size_bytes > limits.submission_bytes_max:
            raise Refused(
                413,
                f"a submission has at most {limits.submission_bytes_max} bytes in this run, "
                f"this one {reference.size_bytes}",
            )
        arriving = sum(push.key[0] == client for push in self._arriving)
        waiting = sum(key[0] == client and not self._judged(key) for key in self._whole)
        if (client, reference.digest) in self._whole:
            waiting = 0  # it came once already, and its worker has not heard so
        if arriving + waiting >= limits.submissions_unjudged_max:
            raise Refused(
                429,
                f"{arriving + waiting} of your submissions wait for a verdict; deliver more later",
            )
        if self._disk.free_bytes() < 2 * reference.size_bytes:
            raise Refused(507, "this validator's disk is full")
        key = (client, reference.digest)
        path = f"{path_of(key)}.{next(self._serial)}.arriving"
        push = _Arriving(self._disk.sink(path, 0, reference.size_bytes), key, path, self)
        self._arriving[push] = None
        return push

    async def receive(self, push: _Arriving, piece: Piece) -> None:
        """Give a push that is whole and has the right hash its final name, durably, unless the file
        is here already or of no use any more."""
        path = path_of(push.key)
        await push.sink.commit(piece)
        with trio.CancelScope(shield=True):  # a file with its name is one that is counted
            exists = self._disk.exists(path)
            if not exists and not self._judged(push.key):
                await self._disk.rename(push.path, path)
                self._arriving.pop(push, None)
            if not self._judged(push.key):
                await self._disk.sync(path)
                self._whole.setdefault(push.key, _Whole(push.size_bytes, self._world.now()))
        push.abandon()

    def ended(self, push: _Arriving) -> None:
        """A push has ended, in whatever way: remove what it left under its own name."""
        if push in self._arriving:
            self._ended.send_nowait(push)

    # --- files that are whole ----------------------------------------------------------------

    def size_bytes(self, key: Key) -> int | None:
        """Size of a whole file that waits for its verdict; None if there is none."""
        whole = self._whole.get(key)
        return whole.size_bytes if whole is not None else None

    def exists(self, key: Key) -> bool:
        """Whether the whole file is on the disk, judged or not."""
        return self._disk.exists(path_of(key))

    def hold(self, key: Key, size_bytes: int) -> None:
        """Keep a file that was announced until its verdict."""
        self._whole[key] = _Whole(size_bytes, self._world.now(), announced=True)

    def let_go(self, key: Key) -> None:
        """Keep a file that was judged, which no longer counts against its worker's quota."""
        self._whole.pop(key, None)

    async def remove(self, key: Key) -> None:
        """Remove a file that is no longer needed; silent when there is none."""
        self._whole.pop(key, None)
        await self._disk.remove(path_of(key))
        await self._disk.remove(canonical_path_of(key))

    async def remove_others(self, wanted: set[Key]) -> None:
        """Remove every other file that an earlier life of this peer left."""
        kept = {path for key in wanted for path in (path_of(key), canonical_path_of(key))}
        for name in self._disk.list(FOLDER):
            if f"{FOLDER}/{name}" not in kept:
                await self._disk.remove(f"{FOLDER}/{name}")

    async def _remove_unannounced(self) -> None:
        while True:
            await trio.sleep(UNANNOUNCED_SECONDS / 4)
            now = self._world.now()
            for key, whole in list(self._whole.items()):
                if not whole.announced and now - whole.arrived > UNANNOUNCED_SECONDS:
                    await self.remove(key)
