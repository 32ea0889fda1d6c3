"""A checkpoint as a mirror: exported as plain files for any web server, or served in place."""

import json
import os
from contextlib import suppress
from pathlib import Path

import msgspec
import trio

from swarm.errors import SwarmError, UserError, file_errors, leaf_errors
from swarm.shardcast import limits
from swarm.shardcast import manifest as manifests
from swarm.shardcast.mirror.folder import INDEX, Index, Progress, index_of
from swarm.shardcast.service import BlobService
from swarm.transport.http.server import BulkServer
from swarm.transport.http.serving import Serving
from swarm.wire.identity import PeerId
from swarm.world.disk import LocalDisk

NO_RUN = "nobody/published"
"""The run id of a checkpoint that belongs to no run."""


async def export(
    folder: Path, out: Path, *, progress: Progress = lambda done, total: None
) -> Index:
    """Write a checkpoint as plain files below `out`, an adapter with its base.

    Keeps existing blobs, so that an interrupted export resumes and checkpoints share equal pieces.
    Checks every blob as it writes it; writes `checkpoint.json` last. Raises `UserError`."""
    if _is_within(out, folder):
        raise UserError(f"--out {out} is in the checkpoint's own folder; choose another")
    manifest, blob = await describe(folder)
    parts = _with_base(folder, manifest, blob)
    total = sum(part.total_bytes for _, part, _ in parts)
    index = index_of(manifest, blob)
    blobs = out / "blob"
    done = 0
    try:
        blobs.mkdir(parents=True, exist_ok=True)
        for source, part, raw in parts:
            _put(blobs / manifests.digest_of(raw).hex(), raw)
            for piece in part.pieces:
                path = source / part.files[piece.file].name
                # One thread per piece, so that Ctrl-C waits for one piece at most.
                await trio.to_thread.run_sync(_export_piece, path, piece, blobs)
                done += piece.size_bytes
                progress(done, total)
        _put(out / INDEX, msgspec.json.encode(index) + b"\n")
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be written ({error.strerror}); choose another folder"
        ) from error
    return index


def _with_base(
    folder: Path, manifest: manifests.CheckpointManifest, blob: bytes
) -> list[tuple[Path, manifests.CheckpointManifest, bytes]]:
    """A checkpoint, and its base if it is an adapter: folders, manifests and their blobs.

    Raises `UserError` if the base is not on this disk: without it the adapter is of no use."""
    parts = [(folder, manifest, blob)]
    if manifest.base is not None:
        with suppress(OSError, ValueError, SwarmError):
            base = folder / (folder / manifests.BASE_NAME).read_text()
            own = own_manifest(base)
            if own is not None and manifests.digest_of(own[1]) == manifest.base.digest:
                return [*parts, (base, *own)]
        raise UserError(
            f"{folder} holds an adapter, and its base, {manifest.base}, is not on this disk as "
            f"{manifests.BASE_NAME} in that folder says; fetch both with `swarm checkpoint "
            "fetch`, and give that folder"
        )
    return parts


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _export_piece(path: Path, piece: manifests.ManifestPiece, blobs: Path) -> None:
    """Write one piece of a file, unless it exists. Raises `UserError` and `OSError`."""
    target = blobs / piece.digest.hex()
    exists = target.is_file() and target.stat().st_size == piece.size_bytes
    # Check the bytes too: after a power cut a file may have the right size but wrong bytes.
    if exists and manifests.digest_of(target.read_bytes()) == piece.digest:
        return
    with file_errors(path), path.open("rb") as file:
        file.seek(piece.offset)
        data = file.read(piece.size_bytes)
    if manifests.digest_of(data) != piece.digest:
        raise differs(path)
    _put(target, data)


def _put(path: Path, data: bytes) -> None:
    aside = path.with_name(path.name + ".aside")
    aside.write_bytes(data)
    aside.rename(path)


async def serve(
    folder: Path,
    *,
    host: str,
    port: int,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a folder as a mirror until cancelled, without copying it; an adapter with its base.

    Starts with the port. Raises `UserError`."""
    manifest, blob = await describe(folder)
    index = index_of(manifest, blob)
    parts = _with_base(folder, manifest, blob)
    root = Path(os.path.commonpath([path.resolve() for path, _, _ in parts]))
    disk = LocalDisk(root)
    service = BlobService(lambda peer, credential: True)
    pages = {b"/" + INDEX.encode(): msgspec.json.encode(index)}
    for path, part, raw in parts:
        pages[b"/blob/" + manifests.digest_of(raw).hex().encode()] = raw
        for piece in part.pieces:
            name = path.resolve().relative_to(root) / part.files[piece.file].name
            service.register(piece.digest, name.as_posix(), piece.offset, piece.size_bytes)
    server = BulkServer(
        Serving(peer_id=PeerId(""), disk=disk, get_service=lambda: service, pages=pages)
    )
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise UserError(
            f"cannot listen on {host or repr(host)} port {port} ({why}); choose another --port or "
            "--host"
        ) from error
    task_status.started(listeners[0].socket.getsockname()[1])
    await server.serve(listeners)


# --- a folder and its manifest ---


async def describe(folder: Path) -> tuple[manifests.CheckpointManifest, bytes]:
    """The manifest in a folder, else a new one, and its blob. Raises `UserError`."""
    try:
        own = own_manifest(folder)
        if own is not None:
            return own
        place = _check_contents(folder)
        manifest = await manifests.build(
            LocalDisk(place.parent), place.name, run=NO_RUN, lineage=0, step=0
        )
    except manifests.BadManifest as error:
        raise UserError(f"{folder} cannot be published: {error}") from error
    except (OSError, ExceptionGroup) as error:
        for cause in leaf_errors(error):
            if isinstance(cause, OSError):
                raise UserError(
                    f"{cause.filename or folder} cannot be read ({cause.strerror})"
                ) from error
        raise
    return manifest, manifest.encode()


def own_manifest(folder: Path) -> tuple[manifests.CheckpointManifest, bytes] | None:
    """The manifest in a folder, and its blob, if any. Raises `UserError` for other sizes."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give the folder of a checkpoint")
    own = folder / manifests.MANIFEST_NAME
    if not own.is_file():
        return None
    with own.open("rb") as opened:  # of an oversized one, just enough for `parse` to refuse it
        blob = opened.read(limits.CHECKPOINT_MANIFEST_BYTES_MAX + 1)
    manifest = manifests.parse(blob)
    for file in manifest.files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.size_bytes:
            raise differs(path)
    return manifest, blob


def differs(path: Path) -> UserError:
    return UserError(f"{path} is not what its manifest says; fetch it again")


def _check_contents(folder: Path) -> Path:
    """The folder, resolved, so that `..` has a name too. Raises `UserError` if it is no checkpoint:
    an entry is no file, it holds no weights, or a file named by the weights' index is missing."""
    folder = folder.resolve()
    names: set[str] = set()
    for path in _visible(folder):
        for each in (path.is_dir() and _visible(path)) or [path]:
            if not each.is_file():
                raise UserError(
                    f"{each} is not a file; remove it: a checkpoint is files, some of them in "
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
