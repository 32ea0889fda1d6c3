"""Files that workers push to a validator, hashed as they arrive, from the first byte until the
verdict. Only a complete file with the right hash gets its final name, of digest and worker; it is
never written to, so the validator later serves the bytes that it judged."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarm.run.run import Run
from swarm.transport import BlobReference, Refused
from swarm.wire.identity import PeerId
from swarm.wire.manifest import Limits
from swarm.wire.messages import Submission
from swarm.world import Disk, Piece, Sink, World

FOLDER = "incoming"
UNANNOUNCED_SECONDS = 60.0
"""Time after which a complete file that was not announced is removed."""

RUN_SHARE = 1 / 2
"""Part of the disk that unjudged files may fill; the rest is for policies and accepted files."""
NEWCOMERS_SHARE = 1 / 4
"""Part of the disk that unjudged files of unproven workers may fill together, so that newcomers
leave room for proven workers."""
NETWORK_SHARE = 1 / 8
"""The same for the unproven workers of one network."""
IDENTITY_SHARE = 1 / 16
"""The same for one worker, proven or not."""

Key = tuple[str, bytes]
"""(worker, digest). A file belongs to its worker; another peer's copy has another key."""


def canonical_path_of(key: Key) -> str:
    """The path of an inspected file's rollouts in canonical form."""
    return path_of(key) + ".canonical"


def path_of(key: Key) -> str:
    """The path of a complete file."""
    worker, digest = key
    return f"{FOLDER}/{digest.hex()}-{worker}.parquet"


@dataclass(frozen=True)
class Client:
    """A worker that pushes, as this validator knows it."""

    network: str = ""
    """Its /24 or /48; empty if its address belongs to no network."""
    proven: bool = False
    helper: bool = False
    """Whether it is admitted in another role than a worker's."""
    pause_seconds: float = 0.0
    """Time until its pushes are accepted again, because it wasted this validator's time."""


@dataclass
class _Whole:
    size_bytes: int
    arrived: float
    client: Client
    announced: bool = False


@dataclass(eq=False)
class _Arriving:
    """A push in progress: a sink on disk that notifies the inbox when it ends. The transport ends
    one that stalls or is too slow; there is no total time limit."""

    sink: Sink
    key: Key
    client: Client
    path: str
    _inbox: "Inbox"

    def __post_init__(self) -> None:
        self.size_bytes = self.sink.size_bytes

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
        self,
        run: Run,
        disk: Disk,
        world: World,
        *,
        judged: Callable[[Key], bool],
        client_of: Callable[[PeerId], Client] = lambda _: Client(),
    ) -> None:
        """`judged` says whether a file has a verdict of any validator."""
        self._judged = judged
        self._client_of = client_of
        self._run = run
        self._disk = disk
        self._world = world
        self._serial = itertools.count()
        self._arriving: dict[_Arriving, None] = {}
        """Pushes in progress, and ended pushes whose temporary file is still on disk."""
        self._whole: dict[Key, _Whole] = {}
        """Complete files that wait for their announcement or their verdict."""
        self._ended, self._to_remove = trio.open_memory_channel[_Arriving](math.inf)
        """Ended pushes. The quotas bound the channel: a push counts until its file is removed."""

    async def run(self) -> None:
        """Remove the temporary files of ended pushes, and files that are never announced."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._remove_unannounced)
            async for push in self._to_remove:
                await self._disk.remove(push.path)
                self._arriving.pop(push, None)

    # --- pushes ------------------------------------------------------------------------------

    def accept(self, client: PeerId | None, reference: BlobReference) -> Sink:
        """Open a sink for a file that a client pushes; raises `Refused`."""
        if client is None:
            raise Refused(
                403,
                "prove your peer id on this connection first: sign its challenge, then push again",
            )
        known = self._client_of(client)
        if known.helper:
            raise Refused(403, "only peers with the role inference push submissions")
        if known.pause_seconds > 0:
            raise Refused(
                429,
                "too many of your submissions were refused or not delivered; "
                f"deliver more in {known.pause_seconds:.0f} s",
            )
        self._check_quota(client, reference)
        self._check_room(client, known, reference.size_bytes)
        key = (client, reference.digest)
        path = f"{path_of(key)}.{next(self._serial)}.arriving"
        push = _Arriving(self._disk.sink(path, 0, reference.size_bytes), key, known, path, self)
        self._arriving[push] = None
        return push

    def has_room(self, client: PeerId, submission: Submission) -> bool:
        """Whether the disk has room for a worker's submission, whatever its own quota says."""
        try:
            self._check_room(client, self._client_of(client), submission.size_bytes)
        except Refused:
            return False
        return True

    def _check_quota(self, client: PeerId, reference: BlobReference) -> None:
        limits: Limits = self._run.manifest.limits
        if reference.size_bytes > limits.submission_bytes_max:
            raise Refused(
                413,
                f"a submission has at most {limits.submission_bytes_max} bytes in this run, "
                f"this one {reference.size_bytes}",
            )
        arriving = sum(push.key[0] == client for push in self._arriving)
        waiting = sum(key[0] == client and not self._judged(key) for key in self._whole)
        if (client, reference.digest) in self._whole:
            waiting = 0  # a repeated push: the worker did not learn that the first one arrived
        if arriving + waiting >= limits.submissions_unjudged_max:
            raise Refused(
                429,
                f"{arriving + waiting} of your submissions wait for a verdict; deliver more later",
            )

    def _check_room(self, client: PeerId, known: Client, size_bytes: int) -> None:
        """Refuse a push without room left; no bound applies to the first file it counts."""
        free = self._disk.free_bytes()
        if free < 2 * size_bytes:
            raise Refused(507, "this validator's disk is full")
        held = [
            *((push.key[0], push.client, push.size_bytes) for push in self._arriving),
            *(
                (key[0], whole.client, whole.size_bytes)
                for key, whole in self._whole.items()
                if not self._judged(key)
            ),
        ]
        # Not the free bytes alone, of which shares would shrink with each file that comes.
        disk = free + sum(size for _, _, size in held)
        unproven = [(worker, each, size) for worker, each, size in held if not each.proven]
        bounds = [
            ("of yours", IDENTITY_SHARE, [size for worker, _, size in held if worker == client]),
            ("of this run", RUN_SHARE, [size for _, _, size in held]),
        ]
        if not known.proven:
            network = [size for _, each, size in unproven if each.network == known.network]
            newcomers = [size for _, _, size in unproven]
            bounds.append(("of unproven workers", NEWCOMERS_SHARE, newcomers))
            if known.network:
                bounds.append((f"of your network ({known.network})", NETWORK_SHARE, network))
        for whose, share, sizes in bounds:
            if sizes and sum(sizes) + size_bytes > share * disk:
                raise Refused(
                    429, f"unjudged files {whose} fill {share:.0%} of this disk; deliver later"
                )

    async def receive(self, push: _Arriving, piece: Piece) -> None:
        """Durably rename a complete push, unless the file exists or has a verdict. Raises `Refused`
        for one that was removed meanwhile, since its announcement was refused."""
        path = path_of(push.key)
        await push.sink.commit(piece)
        with trio.CancelScope(shield=True):  # every file with its final name must be counted
            if not self._disk.exists(path) and not self._judged(push.key):
                await self._disk.rename(push.path, path)
                self._arriving.pop(push, None)
            if not self._judged(push.key):
                try:
                    await self._disk.sync(path)
                except FileNotFoundError as error:
                    raise Refused(409, "its announcement was refused before it was here") from error
                whole = _Whole(push.size_bytes, self._world.now(), push.client)
                self._whole.setdefault(push.key, whole)
        push.abandon()

    def ended(self, push: _Arriving) -> None:
        """Have the temporary file of an ended push removed."""
        if push in self._arriving:
            self._ended.send_nowait(push)

    # --- complete files ----------------------------------------------------------------------

    def size_bytes(self, key: Key) -> int | None:
        """Size of a complete file without a verdict; None if there is no such file."""
        whole = self._whole.get(key)
        return whole.size_bytes if whole is not None else None

    def exists(self, key: Key) -> bool:
        """Whether the complete file is on disk, judged or not."""
        return self._disk.exists(path_of(key))

    def hold(self, key: Key, size_bytes: int) -> None:
        """Keep a file that a case needs until its verdict."""
        pushed = self._whole.get(key)
        client = pushed.client if pushed is not None else Client()
        self._whole[key] = _Whole(size_bytes, self._world.now(), client, announced=True)

    def let_go(self, key: Key) -> None:
        """Keep a judged file, but stop counting it against its worker's quota."""
        self._whole.pop(key, None)

    async def discard(self, key: Key) -> None:
        """Remove a file whose announcement gets no verdict here, unless a case needs it."""
        whole = self._whole.get(key)
        if whole is None or not whole.announced:
            await self.remove(key)

    async def remove(self, key: Key) -> None:
        """Remove a file that is no longer needed; does nothing if it does not exist."""
        self._whole.pop(key, None)
        await self._disk.remove(path_of(key))
        await self._disk.remove(canonical_path_of(key))

    async def remove_others(self, wanted: set[Key]) -> None:
        """Remove every file not in `wanted`; called at the start of the peer."""
        kept = {path for key in wanted for path in (path_of(key), canonical_path_of(key))}
        for name in self._disk.list(FOLDER):
            if f"{FOLDER}/{name}" not in kept:
                await self._disk.remove(f"{FOLDER}/{name}")

    async def _remove_unannounced(self) -> None:
        while True:
            await trio.sleep(UNANNOUNCED_SECONDS / 4)
            now = self._world.now()
            for key, whole in list(self._whole.items()):
                # It may have been announced while another one was removed.
                unannounced = self._whole.get(key) is whole and not whole.announced
                if unannounced and now - whole.arrived > UNANNOUNCED_SECONDS:
                    await self.remove(key)
