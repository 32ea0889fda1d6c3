"""Checkpoints outside a run: as plain files that any web server or bucket serves, and back.

    <root>/checkpoint.json      which checkpoint this is, by its manifest's digest
    <root>/blob/<hex digest>    its manifest, its pieces, and those of its deltas

A mirror is not trusted: whoever fetches checks every blob by its name. Only `checkpoint.json` is
believed as it is, by a person who gives nothing but the mirror's address; peers of a run know the
manifest from the trainer's signature.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import trio

from swarm import defaults
from swarm.errors import DECODE_ERRORS, DiskFullError, UserError, leaf_errors
from swarm.events import Events
from swarm.identity import Identity, PeerId
from swarm.messages import Checkpoint, Count
from swarm.shardcast.fetch.fetcher import Fetcher
from swarm.shardcast.held import Change, Held
from swarm.shardcast.manifest import (
    MANIFEST_NAME,
    BadManifest,
    CheckpointManifest,
    ManifestFile,
    ManifestPiece,
    build,
    digest_of,
    is_mirror,
    parse,
)
from swarm.shardcast.service import BlobService
from swarm.shardcast.store import CheckpointStore
from swarm.transport import Arrived, BlobReference, FetchError, Source
from swarm.transport.base import Traffic
from swarm.transport.http.client import BulkClient
from swarm.transport.http.heads import Unreachable
from swarm.transport.http.pace import Uplink
from swarm.transport.http.server import BulkServer
from swarm.transport.http.serving import Serving
from swarm.world import Piece, Sink
from swarm.world.disk import LocalDisk
from swarm.world.machine import Machine

INDEX = "checkpoint.json"
_INDEX_BYTES_MAX = 64 * 1024
_NO_RUN = "nobody/published"
"""Whose checkpoint it is when nobody says."""
_RUN_CHARACTERS_MAX = 200

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
        if not _is_run(self.run):
            raise UserError(f"the mirror's {INDEX} names no run: {self.run[:80]!r}")
        return Checkpoint(
            lineage=self.lineage,
            step=self.step,
            manifest_digest=digest,
            manifest_bytes=self.manifest_bytes,
            total_bytes=self.total_bytes,
        )


def _is_run(text: str) -> bool:
    """Whether this may stand for a run: it is shown on terminals."""
    return 1 <= len(text) <= _RUN_CHARACTERS_MAX and text.isprintable()


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
    if run is not None and not _is_run(run):
        raise UserError(f"--run {run[:80]!r} is no run's id; write it like lab/model")
    try:
        own = _own_manifest(folder)
        if own is not None:
            _refuse_other(folder, own[0], run, lineage, step, mirrors)
            return own
        place = _check_contents(folder)
        disk = LocalDisk(place.parent)
        manifest = await build(
            disk,
            place.name,
            run=_NO_RUN if run is None else run,
            lineage=lineage or 0,
            step=step or 0,
        )
    except BadManifest as error:
        raise UserError(f"{folder} cannot be published: {error}") from error
    except (OSError, ExceptionGroup) as error:
        cause = _disk_error(error)
        raise UserError(f"{cause.filename or folder} cannot be read ({cause.strerror})") from error
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


def read_bounded(path: Path) -> bytes:
    """A file with a manifest; of a longer one so much that `parse` refuses it. May raise
    `OSError`."""
    with path.open("rb") as file:
        return file.read(defaults.CHECKPOINT_MANIFEST_BYTES_MAX + 1)


def _disk_error(error: OSError | ExceptionGroup[Exception]) -> OSError:
    """The disk's error in a nursery's; anything else is raised again."""
    for leaf in leaf_errors(error):
        if isinstance(leaf, OSError):
            return leaf
    raise error


def _own_manifest(folder: Path) -> tuple[CheckpointManifest, bytes] | None:
    """The manifest in a folder, and its blob, if there is one; its files have the right sizes."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give the folder of a checkpoint")
    own = folder / MANIFEST_NAME
    if not own.is_file():
        return None
    blob = read_bounded(own)
    manifest = parse(blob)
    for file in manifest.files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.size_bytes:
            raise _differs(path)
    return manifest, blob


def _differs(path: Path) -> UserError:
    return UserError(f"{path} is not what its manifest says; `swarm checkpoint verify` tells where")


def _check_contents(folder: Path) -> Path:
    """The folder, resolved, so that `..` has a name too. Raises `UserError` where nobody could
    load what is in it: something that is no file, no weights, or not all that their index names.
    """
    folder = folder.resolve()
    names: set[str] = set()
    for path in _visible(folder):
        for each in (path.is_dir() and _visible(path)) or [path]:
            if not each.is_file():
                raise UserError(
                    f"{each} is no file; take it away: a checkpoint is files, some of them in "
                    "folders one deep"
                )
            names.add(each.relative_to(folder).as_posix())
    if not any(name.endswith(".safetensors") for name in names):
        raise UserError(
            f"{folder} holds no .safetensors file; give the folder of a checkpoint in the "
            "Hugging Face layout"
        )
    for index in (name for name in names if name.endswith(".safetensors.index.json")):
        try:
            named = set(json.loads((folder / index).read_bytes())["weight_map"].values())
            missing = sorted(named - names)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{folder / index} is no index of safetensors files") from error
        if missing:
            raise UserError(
                f"{folder / index} names {missing[0]!r}, which is not there; put it there first"
            )
    return folder


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


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
    if _is_within(out, folder):
        raise UserError(f"--out {out} is in the checkpoint's own folder; choose another")
    manifest, blob = await describe(folder, run=run, lineage=lineage, step=step, mirrors=mirrors)
    parts = [(folder, manifest, blob), *await _named_deltas(folder, manifest)]
    total = sum(part.total_bytes for _, part, _ in parts)
    index = index_of(manifest, blob)
    blobs = out / "blob"
    done = 0
    try:
        blobs.mkdir(parents=True, exist_ok=True)
        for source, part, raw in parts:
            _put(blobs / digest_of(raw).hex(), raw)
            for piece in part.pieces:
                path = source / part.files[piece.file].name
                # A thread a piece, so that Ctrl-C need not wait for more than one.
                await trio.to_thread.run_sync(_export_piece, path, piece, blobs)
                done += piece.size_bytes
                progress(done, total)
        _put(out / INDEX, msgspec.json.encode(index) + b"\n")
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be written ({error.strerror}); choose another folder"
        ) from error
    return index


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


async def _named_deltas(
    folder: Path, manifest: CheckpointManifest
) -> list[tuple[Path, CheckpointManifest, bytes]]:
    """The deltas that a manifest names and that are whole: others are still arriving."""
    named = {link.manifest for link in manifest.deltas}
    found = []
    for path in _deltas(folder) if named else []:
        try:
            blob = read_bounded(path / MANIFEST_NAME)
        except OSError:
            continue
        if digest_of(blob) in named and not await verify(path, blob):
            found.append((path, parse(blob), blob))
    return found


def _export_piece(path: Path, piece: ManifestPiece, blobs: Path) -> None:
    """Write one piece of a file, if it is not there. Raises `UserError`, and `OSError` where it
    cannot be written."""
    target = blobs / piece.digest.hex()
    is_there = target.is_file() and target.stat().st_size == piece.size_bytes
    # Read as well: after a power cut a file may have its size and not its bytes.
    if is_there and digest_of(target.read_bytes()) == piece.digest:
        return
    try:
        with path.open("rb") as file:
            file.seek(piece.offset)
            data = file.read(piece.size_bytes)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    if digest_of(data) != piece.digest:
        raise _differs(path)
    _put(target, data)


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
        Serving(
            peer_id=PeerId(""),
            disk=disk,
            get_service=lambda: service,
            traffic=Traffic(),
            uplink=Uplink(uplink_bytes_per_second),
            pages=pages,
        )
    )
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise UserError(
            f"cannot listen on {host or repr(host)} port {port} ({why}); choose another --port or "
            "--host"
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
        return self._client.pool.round_trip_seconds(source.addresses)

    async def first_index(self, roots: Sequence[str]) -> tuple[str, Index]:
        """The first mirror that can be asked, and its `checkpoint.json`; raises `FetchError` or
        `UserError`."""
        reasons = []
        for root in roots:
            try:
                return root, await self.index(root)
            except FetchError as error:
                reasons.append(str(error).rstrip())
        raise FetchError(
            f"{'; '.join(reasons)}; give the address of a mirror: what serves the files that "
            "`swarm checkpoint export` wrote"
        )

    async def index(self, root: str) -> Index:
        """A mirror's `checkpoint.json`; raises `FetchError` or `UserError`."""
        root = root.rstrip("/")
        raw = await self._client.document(root, "/" + INDEX, _INDEX_BYTES_MAX)
        try:
            return msgspec.json.decode(raw, type=Index)
        except DECODE_ERRORS as error:
            raise UserError(f"{root}/{INDEX} describes no checkpoint: {error}") from error

    def close(self) -> None:
        self._client.pool.close()


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

    What to fetch is in `manifest_file`, or what the first mirror that answers says, if that is the
    manifest `manifest_digest` (where given). Raises `UserError`, `DeadlineError`, `BadManifest`,
    `FetchError`.
    """
    check_out(out)
    for mirror in mirrors:
        if not is_mirror(mirror):
            raise UserError(f"{mirror!r} is no http:// or https:// address")
    blob = _read_manifest(manifest_file) if manifest_file is not None else None
    with writing(out) as disk:
        transport = MirrorTransport(disk)
        try:
            if blob is not None:
                told_by, index = str(manifest_file), index_of(parse(blob), blob)
            else:
                told_by, index = await transport.first_index(mirrors)
            checkpoint = index.checkpoint()
            if manifest_digest is not None and checkpoint.manifest_digest != manifest_digest:
                raise UserError(
                    f"{told_by} has the checkpoint with manifest {index.manifest[:12]}…, not "
                    f"--manifest {manifest_digest.hex()[:12]}…; give another address or file, or "
                    "the digest of what is to be fetched"
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
        blob = read_bounded(path)
        parse(blob)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); give a file with a manifest, or a "
            "mirror's address, which begins with http:// or https://"
        ) from error
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
    out = out.resolve()
    return out.with_name(out.name + ".partial")


def check_out(out: Path) -> None:
    """Raise `UserError` unless a fetched checkpoint can become the folder `out`."""
    try:
        if out.exists():
            if not out.is_dir() or any(out.iterdir()):
                raise UserError(f"--out {out} exists and is not an empty folder; choose another")
            if out.is_mount() or out.samefile(Path.cwd()):
                raise UserError(
                    f"--out {out} is in use as it is, so no other folder can take its place; "
                    "choose a folder in it"
                )
    except OSError as error:
        raise UserError(_not_written(out, error)) from error


def _not_written(out: Path, error: OSError) -> str:
    return f"--out {out} cannot be written ({error.strerror}); choose another folder"


@contextmanager
def writing(out: Path) -> Iterator[LocalDisk]:
    """The disk for a fetch into `out`; its errors are the person's to mend (`UserError`)."""
    partial = partial_of(out)
    try:
        yield LocalDisk(partial)
    except (DiskFullError, OSError, ExceptionGroup) as error:
        leaves = leaf_errors(error)
        for leaf in leaves:
            if isinstance(leaf, DiskFullError):
                # What a peer has in its home lies beside --out here.
                raise DiskFullError(str(leaf).replace("--home", "--out")) from error
        if isinstance(leaves[0], OSError):
            raise UserError(_not_written(out, leaves[0])) from error
        raise
    finally:
        with suppress(OSError):
            partial.rmdir()  # nothing came


async def move_out(disk: LocalDisk, held: Held, out: Path) -> None:
    """Make a complete checkpoint the folder `out`, durably; the rest of its disk is removed."""
    await disk.sync(held.folder)

    def move() -> None:
        place = out.resolve()
        if place.exists():
            place.rmdir()
        disk.local_path(held.folder).rename(place)
        shutil.rmtree(partial_of(place))

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
    pieces: list[list[ManifestPiece]] = [[] for _ in manifest.files]
    for piece in manifest.pieces:
        pieces[piece.file].append(piece)
    for file, its_pieces in zip(manifest.files, pieces, strict=True):
        try:
            tell = functools.partial(_tell_more, progress, done, manifest.total_bytes)
            problem = await _verify_file(disk, file, its_pieces, tell)
        except OSError as error:
            problem = f"{file.name} cannot be read ({error.strerror})"
        if problem is not None:
            problems.append(problem)
        done += file.size_bytes
        progress(done, manifest.total_bytes)
    return problems


def _tell_more(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


async def _verify_file(
    disk: LocalDisk,
    file: ManifestFile,
    pieces: Sequence[ManifestPiece],
    tell: Callable[[int], None],
) -> str | None:
    """What is wrong with one file, if anything; may raise `OSError`."""
    if not disk.exists(file.name):
        return f"{file.name} is missing"
    if not disk.local_path(file.name).is_file():
        return f"{file.name} is no file"
    if (size := disk.size_bytes(file.name)) != file.size_bytes:
        return f"{file.name} has {size:,} bytes, not {file.size_bytes:,}"
    wrong = []
    for piece in pieces:
        if await disk.digest(file.name, piece.offset, piece.size_bytes) != piece.digest:
            wrong.append(piece.offset)
        tell(piece.offset + piece.size_bytes)
    if wrong:
        return (
            f"{file.name} differs in {len(wrong)} of {len(pieces)} pieces, first at byte "
            f"{wrong[0]:,}"
        )
    if await disk.sha256(file.name) != file.sha256:
        return f"{file.name} has another SHA-256 than its pieces add up to"
    return None
