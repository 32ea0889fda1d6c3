"""The output folder of a fetch: pieces arrive in a folder beside it, which is then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from swarm.errors import DiskFullError, UserError, leaf_errors
from swarm.shardcast.held import Change, Held
from swarm.shardcast.mirror.index import Progress
from swarm.world.disk import LocalDisk


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
    return out.with_name(out.name + ".partial")


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
                # The message names a peer's --home; here the folder is --out.
                raise DiskFullError(str(leaf).replace("--home", "--out")) from error
        if isinstance(leaves[0], OSError):
            raise UserError(_not_written(out, leaves[0])) from error
        raise
    finally:
        with suppress(OSError):
            partial.rmdir()  # nothing arrived


async def move_out(disk: LocalDisk, held: Held, out: Path) -> None:
    """Move a complete checkpoint to the folder `out`, durably, and remove the partial folder."""
    await disk.sync(held.folder)

    def move() -> None:
        target = out.resolve()
        if target.exists():
            target.rmdir()
        disk.local_path(held.folder).rename(target)
        shutil.rmtree(partial_of(target))

    await trio.to_thread.run_sync(move)
