"""The output folder of a fetch: pieces arrive in a folder beside it, which is then renamed.

The index of a mirror, `checkpoint.json`: which checkpoint it has."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import trio

from swarm.errors import DiskFullError, UserError, leaf_errors
from swarm.shardcast import limits
from swarm.shardcast.held import Change, Held
from swarm.shardcast.manifest import BASE_NAME, CheckpointManifest, digest_of
from swarm.wire.messages import Checkpoint, CheckpointReference, Count
from swarm.world.disk import LocalDisk

INDEX = "checkpoint.json"
RUN_CHARACTERS_MAX = 200
"""Longest run id in a mirror's index: it is shown on terminals."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `checkpoint.json`."""

    run: str
    lineage: Count
    step: Count
    manifest: str
    """BLAKE3-256 of the manifest, in hexadecimal."""
    manifest_bytes: int
    total_bytes: Count

    def checkpoint(self) -> Checkpoint:
        """The message with which a trainer would announce this checkpoint; raises `UserError`."""
        try:
            digest = bytes.fromhex(self.manifest)
        except ValueError:
            digest = b""
        if len(digest) != 32 or not 1 <= self.manifest_bytes <= (
            limits.CHECKPOINT_MANIFEST_BYTES_MAX
        ):
            raise UserError(f"the mirror's {INDEX} names no manifest: {self.manifest[:80]!r}")
        if not 1 <= len(self.run) <= RUN_CHARACTERS_MAX or not self.run.isprintable():
            raise UserError(f"the mirror's {INDEX} names no run: {self.run[:80]!r}")
        return Checkpoint(
            reference=CheckpointReference(
                lineage=self.lineage, step=self.step, digest=digest, size_bytes=self.manifest_bytes
            ),
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


BASE_FOLDER = ".base-policy"
"""The base of a fetched adapter, in the adapter's folder; the dot keeps it out of manifests."""


def watcher(progress: Progress) -> Callable[[Change, Held, int], None]:
    """A watcher for `CheckpointStore.watch` that reports each piece to `progress`."""

    done: dict[bytes, int] = {}

    def watch(change: Change, held: Held, index: int) -> None:
        pieces = held.manifest.pieces
        if change is Change.PIECE and held.digest in done:
            done[held.digest] += pieces[index].size_bytes
        else:
            done[held.digest] = sum(
                piece.size_bytes for piece, has in zip(pieces, held.pieces, strict=True) if has
            )
        progress(done[held.digest], held.manifest.total_bytes)

    return watch


def partial_of(out: Path) -> Path:
    """The folder in which a fetch into `out` keeps its pieces until it is complete."""
    out = out.resolve()
    return out.with_name(f"{out.name}.partial")


def check_out(out: Path) -> None:
    """Raise `UserError` unless a fetched checkpoint can become the folder `out`."""
    try:
        if out.exists():
            if not out.is_dir() or any(out.iterdir()):
                raise UserError(f"--out {out} exists and is not an empty folder; choose another")
            if out.is_mount() or out.samefile(Path.cwd()):
                raise UserError(
                    f"--out {out} is the current folder or a mount point; choose a folder in it"
                )
    except OSError as error:
        raise UserError(_not_written(out, error)) from error


def _not_written(out: Path, error: OSError) -> str:
    return f"--out {out} cannot be written ({error.strerror}); choose another folder"


@contextmanager
def writing(out: Path) -> Iterator[LocalDisk]:
    """The disk for a fetch into `out`; its errors become `UserError`."""
    partial = partial_of(out)
    try:
        yield LocalDisk(partial)
    except (DiskFullError, OSError, ExceptionGroup) as error:
        leaves = leaf_errors(error)
        for leaf in leaves:
            if isinstance(leaf, DiskFullError):
                # The message names a peer's --home; here the folder may be another option's.
                raise DiskFullError(str(leaf).replace("--home", "--out")) from error
        if isinstance(leaves[0], OSError):
            raise UserError(_not_written(out, leaves[0])) from error
        raise
    finally:
        with suppress(OSError):
            partial.rmdir()  # nothing arrived


async def move_out(disk: LocalDisk, held: Held, out: Path, base: Held | None = None) -> None:
    """Move a complete checkpoint to the folder `out`, durably, and remove the partial folder.

    `base`: the complete checkpoint that it adapts, which becomes a folder in `out`."""
    await disk.sync(held.folder)
    if base is not None:
        await disk.sync(base.folder)
        await disk.remove(f"{held.folder}/{BASE_FOLDER}")
        await disk.rename(base.folder, f"{held.folder}/{BASE_FOLDER}")
        await disk.write(f"{held.folder}/{BASE_NAME}", BASE_FOLDER.encode())

    def move() -> None:
        target = out.resolve()
        if target.exists():
            target.rmdir()
        disk.local_path(held.folder).rename(target)
        shutil.rmtree(partial_of(target))

    await trio.to_thread.run_sync(move)
