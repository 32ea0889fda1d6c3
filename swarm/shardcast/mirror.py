"""Checkpoints outside a run: as plain files that any web server or bucket serves, and back.

    <root>/checkpoint.json      which checkpoint this is, by its manifest's digest
    <root>/blob/<hex digest>    its manifest, its pieces, and those of its deltas

A mirror is not trusted: whoever fetches checks every blob by its name. Only `checkpoint.json` is
believed as it is, by a person who gives nothing but the mirror's address; peers of a run know the
manifest from the trainer's signature.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import trio

from swarm import defaults
from swarm.errors import DECODE_ERRORS, UserError
from swarm.events import Events
from swarm.identity import Identity, PeerId
from swarm.messages import Checkpoint, Count
from swarm.shardcast.fetch import Fetcher
from swarm.shardcast.manifest import (
    MANIFEST_NAME,
    BadManifest,
    CheckpointManifest,
    build,
    digest_of,
    is_mirror,
    parse,
)
from swarm.shardcast.service import BlobService
from swarm.shardcast.store import Change, CheckpointStore, Held
from swarm.transport import Arrived, BlobReference, FetchError, Source
from swarm.transport.base import Traffic
from swarm.transport.bulk import BulkClient, BulkServer, Unreachable, Uplink
from swarm.world import Piece, Sink
from swarm.world.disk import LocalDisk
from swarm.world.machine import Machine

INDEX = "checkpoint.json"
_INDEX_BYTES_MAX = 64 * 1024
_NO_RUN = "nobody/published"
"""Whose checkpoint it is when nobody says."""

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """What `checkpoint.json` says."""

    run: str
    lineage: Count
    step: Count
    manifest: str
    """BLAKE3 of the manifest, in hexadecimal."""
    manifest_bytes: int
    total_bytes: Count

    def checkpoint(self) -> Checkpoint:
        """As the trainer would announce it; raises `UserError`."""
        try:
            digest = bytes.fromhex(self.manifest)
        except ValueError:
            digest = b""
        if len(digest) != 32 or not 1 <= self.manifest_bytes <= (
            defaults.CHECKPOINT_MANIFEST_BYTES_MAX
        ):
            raise UserError(f"the mirror's {INDEX} names no manifest: {self.manifest[:80]!r}")
        return Checkpoint(
            lineage=self.lineage,
            step=self.step,
            manifest_digest=digest,
            manifest_bytes=self.manifest_bytes,
            total_bytes=self.total_bytes,
        )


def index_of(manifest: CheckpointManifest, blob: bytes) -> Index:
    return Index(
        run=manifest.run,
        lineage=manifest.lineage,
        step=manifest.step,
        manifest=digest_of(blob).hex(),
        manifest_bytes=len(blob),
        total_bytes=manifest.total_bytes,
    )


# --- describing a folder -----------------------------------------------------------------------


async def describe(
    folder: Path,
    *,
    run: str | None = None,
    lineage: int | None = None,
    step: int | None = None,
    mirrors: Sequence[str] = (),
) -> tuple[CheckpointManifest, bytes]:
    """The manifest of a folder, and its blob: the one it came with, or a new one, which says what
    is given here.

    Raises `UserError` where the folder, or a mirror's address, is no good, or the manifest it came
    with says something else.
    """
    for mirror in mirrors:
        if not is_mirror(mirror):
            raise UserError(f"--mirror {mirror!r} is no http:// or https:// address")
    try:
        folder, blob = _own_manifest(folder)
        if blob is not None:
            own = parse(blob)
            _refuse_other(folder, own, run, lineage, step, mirrors)
            return own, blob
        disk = LocalDisk(folder.parent)
        manifest = await build(
            disk,
            folder.name,
            run=_NO_RUN if run is None else run,
            lineage=lineage or 0,
            step=step or 0,
        )
    except BadManifest as error:
        raise UserError(f"{folder} cannot be published: {error}") from error
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror})") from error
    manifest = msgspec.structs.replace(manifest, mirrors=list(mirrors))
    return manifest, manifest.encode()


def _refuse_other(
    folder: Path,
    own: CheckpointManifest,
    run: str | None,
    lineage: int | None,
    step: int | None,
    mirrors: Sequence[str],
) -> None:
    """Refuse what a person says of a folder whose own manifest says something else."""
    for flag, given, there in (
        ("--run", run, own.run),
        ("--lineage", lineage, own.lineage),
        ("--step", step, own.step),
        ("--mirror", list(mirrors) or None, own.mirrors),
    ):
        if given is not None and given != there:
            raise UserError(
                f"{folder} has a manifest of its own (policy {own.step} of {own.run}), which "
                f"{flag} cannot change; leave it out"
            )


def _own_manifest(folder: Path) -> tuple[Path, bytes | None]:
    """The folder, absolute, and the manifest in it, if there is one."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give the folder of a checkpoint")
    own = folder / MANIFEST_NAME
    return folder.absolute(), own.read_bytes() if own.is_file() else None


def _deltas(folder: Path) -> list[Path]:
    """Folders of the deltas that a peer keeps beside a checkpoint's folder."""
    return sorted(path for path in folder.absolute().parent.glob("*.delta") if path.is_dir())


# --- exporting ---------------------------------------------------------------------------------


async def export(
    folder: Path,
    out: Path,
    *,
    run: str | None = None,
    lineage: int | None = None,
    step: int | None = None,
    mirrors: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> Index:
    """Write a checkpoint as plain files below `out`; what is there already is kept, so that an
    interrupted export goes on and checkpoints share what they have in common. Every blob is checked
    as it is written; `checkpoint.json` comes last. Raises `UserError`."""
    manifest, blob = await describe(folder, run=run, lineage=lineage, step=step, mirrors=mirrors)
    parts = [(folder, manifest, blob)]
    named = {link.manifest for link in manifest.deltas}
    for path in _deltas(folder) if named else []:
        held = (path / MANIFEST_NAME).read_bytes()
        if digest_of(held) in named:
            parts.append((path, parse(held), held))
    total = sum(part.total_bytes for _, part, _ in parts)
    index = index_of(manifest, blob)

    def write() -> None:
        blobs = out / "blob"
        blobs.mkdir(parents=True, exist_ok=True)
        done = 0
        for source, part, raw in parts:
            _put(blobs / digest_of(raw).hex(), raw)
            for piece in part.pieces:
                target = blobs / piece.digest.hex()
                if not target.is_file() or target.stat().st_size != piece.size_bytes:
                    path = source / part.files[piece.file].name
                    with path.open("rb") as file:
                        file.seek(piece.offset)
                        data = file.read(piece.size_bytes)
                    if digest_of(data) != piece.digest:
                        raise UserError(
                            f"{path} is not what its manifest says; `swarm checkpoint verify` "
                            "tells where"
                        )
                    _put(target, data)
                done += piece.size_bytes
                progress(done, total)
        _put(out / INDEX, msgspec.json.encode(index) + b"\n")

    try:
        await trio.to_thread.run_sync(write)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror})") from error
    return index


def _put(path: Path, data: bytes) -> None:
    """A file that is there whole or not at all."""
    aside = path.with_name(path.name + ".aside")
    aside.write_bytes(data)
    aside.rename(path)


# --- serving -----------------------------------------------------------------------------------


async def serve(
    folder: Path,
    *,
    host: str,
    port: int,
    run: str | None = None,
    lineage: int | None = None,
    step: int | None = None,
    uplink_bytes_per_second: float | None = None,
    ready: Callable[[int, Index], None] = lambda port, index: None,
) -> None:
    """Be a mirror of a folder until cancelled, for everybody, without copying it.

    `ready` is told the port. Raises `UserError`.
    """
    manifest, blob = await describe(folder, run=run, lineage=lineage, step=step)
    index = index_of(manifest, blob)
    disk = LocalDisk(folder)
    service = BlobService(lambda peer, credential: True)
    for piece in manifest.pieces:
        name = manifest.files[piece.file].name
        service.register(piece.digest, name, piece.offset, piece.size_bytes)
    pages = {
        b"/" + INDEX.encode(): msgspec.json.encode(index),
        b"/blob/" + index.manifest.encode(): blob,
    }
    server = BulkServer(
        PeerId(""),
        disk,
        lambda: service,
        Traffic(),
        uplink=Uplink(uplink_bytes_per_second),
        pages=pages,
    )
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another --port"
        ) from error
    ready(listeners[0].socket.getsockname()[1], index)
    await server.serve(listeners)


# --- fetching ----------------------------------------------------------------------------------


class MirrorTransport:
    """The part of a transport that fetching from mirrors needs: HTTP, and no identity."""

    def __init__(self, disk: LocalDisk) -> None:
        self.peer_id = PeerId("")
        self._client = BulkClient(Identity(os.urandom(32)), disk, lambda: b"", Traffic())

    async def fetch(self, source: Source, reference: BlobReference, sink: Sink) -> Piece:
        last = FetchError("a source has no address")
        for root in source.addresses:
            try:
                return await self._client.fetch(root, None, reference, sink)
            except Unreachable as error:
                last = error
        raise last

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        last = FetchError("a source has no address")
        for root in source.addresses:
            try:
                return await self._client.fetch_run(root, None, wanted, arrived)
            except Unreachable as error:
                last = error
        raise last

    def round_trip_seconds(self, source: Source) -> float:
        return self._client.round_trip_seconds(source.addresses)

    async def index(self, root: str) -> Index:
        """A mirror's `checkpoint.json`; raises `FetchError` or `UserError`."""
        raw = await self._client.document(root.rstrip("/"), "/" + INDEX, _INDEX_BYTES_MAX)
        try:
            return msgspec.json.decode(raw, type=Index)
        except DECODE_ERRORS as error:
            raise UserError(f"{root}/{INDEX} describes no checkpoint: {error}") from error

    def close(self) -> None:
        self._client.close()


async def fetch(
    out: Path,
    *,
    mirrors: Sequence[str] = (),
    manifest_file: Path | None = None,
    manifest_digest: bytes | None = None,
    deadline_seconds: float = defaults.CHECKPOINT_DEADLINE_SECONDS,
    progress: Progress = lambda done, total: None,
) -> Held:
    """Fetch a checkpoint from mirrors into the folder `out`; interrupted, it goes on next time.

    What to fetch is in `manifest_file`, or what the first mirror says, if that is the manifest
    `manifest_digest` (where given). Raises `UserError`, `DeadlineError`, `BadManifest`,
    `FetchError`.
    """
    check_out(out)
    for mirror in mirrors:
        if not is_mirror(mirror):
            raise UserError(f"{mirror!r} is no http:// or https:// address")
    blob = _read_manifest(manifest_file) if manifest_file is not None else None
    disk = LocalDisk(partial_of(out))
    transport = MirrorTransport(disk)
    try:
        if blob is not None:
            index = index_of(parse(blob), blob)
        else:
            index = await transport.index(mirrors[0])
        checkpoint = index.checkpoint()
        if manifest_digest is not None and checkpoint.manifest_digest != manifest_digest:
            raise UserError(
                f"{manifest_file or mirrors[0]} has the checkpoint with manifest "
                f"{index.manifest[:12]}…, not --manifest {manifest_digest.hex()[:12]}…; give "
                "another address or file, or the digest of what is to be fetched"
            )
        world = Machine()
        events = Events(world, "fetch")
        store = CheckpointStore(disk, index.run, events)
        store.watch(watcher(progress))
        await store.recover()
        if blob is not None and store.held((checkpoint.lineage, checkpoint.step)) is None:
            await _begin(store, checkpoint, blob)
        sources = [Source(addresses=(mirror.rstrip("/"),)) for mirror in mirrors]
        fetcher = Fetcher(world, transport, store, events)
        await fetcher.fetch(checkpoint, lambda: sources, deadline_seconds=deadline_seconds)
        held = store.held((checkpoint.lineage, checkpoint.step))
        assert held is not None
        await move_out(disk, held, out)
        return held
    finally:
        transport.close()


def _read_manifest(path: Path) -> bytes:
    try:
        blob = path.read_bytes()
        parse(blob)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except BadManifest as error:
        raise UserError(f"{path}: {error}") from error
    return blob


async def _begin(store: CheckpointStore, checkpoint: Checkpoint, blob: bytes) -> None:
    key = (checkpoint.lineage, checkpoint.step)
    sink = await store.manifest_sink(key, len(blob))
    sink.write(blob)
    await sink.commit(sink.finish())
    await store.begin(key, checkpoint.manifest_digest)


def watcher(progress: Progress) -> Callable[[Change, Held, int], None]:
    """For `CheckpointStore.watch`: tells `progress` of each piece."""

    done: dict[bytes, int] = {}

    def watch(change: Change, held: Held, index: int) -> None:
        pieces = held.manifest.pieces
        if change is Change.PIECE and held.digest in done:
            done[held.digest] += pieces[index].size_bytes
        else:
            there = held.pieces or bytes(len(pieces))
            done[held.digest] = sum(
                piece.size_bytes for piece, has in zip(pieces, there, strict=True) if has
            )
        progress(done[held.digest], held.manifest.total_bytes)

    return watch


def partial_of(out: Path) -> Path:
    """Where a fetch into `out` keeps what it has until it has all."""
    out = out.absolute()
    return out.with_name(out.name + ".partial")


def check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists and is not an empty folder; choose another")


async def move_out(disk: LocalDisk, held: Held, out: Path) -> None:
    """Make a complete checkpoint the folder `out`, durably; the rest of its disk is removed."""
    await disk.sync(held.folder)

    def move() -> None:
        if out.exists():
            out.rmdir()
        disk.local_path(held.folder).rename(out)
        shutil.rmtree(partial_of(out))

    await trio.to_thread.run_sync(move)


# --- verifying ---------------------------------------------------------------------------------


async def verify(
    folder: Path, blob: bytes, progress: Progress = lambda done, total: None
) -> list[str]:
    """What is wrong with a folder, by its manifest: a line a file, none when all is right.

    Raises `BadManifest`.
    """
    manifest = parse(blob)
    disk = LocalDisk(folder)
    problems: list[str] = []
    done = 0
    for number, file in enumerate(manifest.files):
        if not disk.exists(file.name):
            problems.append(f"{file.name} is missing")
        elif (size := disk.size_bytes(file.name)) != file.size_bytes:
            problems.append(f"{file.name} has {size:,} bytes, not {file.size_bytes:,}")
        else:
            pieces = [piece for piece in manifest.pieces if piece.file == number]
            wrong = [
                piece.offset
                for piece in pieces
                if await disk.digest(file.name, piece.offset, piece.size_bytes) != piece.digest
            ]
            if wrong:
                problems.append(
                    f"{file.name} differs in {len(wrong)} of {len(pieces)} pieces, first at byte "
                    f"{wrong[0]:,}"
                )
            elif await disk.sha256(file.name) != file.sha256:
                problems.append(f"{file.name} has another SHA-256 than its pieces add up to")
        done += file.size_bytes
        progress(done, manifest.total_bytes)
    return problems
