"""Folders that appear complete or not at all, even after a power cut."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from peers.learning.ranks import Ranks
from swarm.world.disk import sync_path


@contextmanager
def whole_folder(
    folder: Path, ranks: Ranks | None = None, *, saving: bool = False
) -> Iterator[Path]:
    """Yield an empty folder beside `folder`; on success make it durable and rename it to `folder`.

    It replaces an existing folder. If the block raises, the new folder is deleted. Several ranks
    all write into the same folder; if one fails, all fail. `saving` is as in `Ranks.agree`."""
    ranks = ranks or Ranks()
    aside = folder.with_name(folder.name + ".aside")
    replaced = folder.with_name(folder.name + ".replaced.aside")
    new = [parent for parent in folder.parents if not parent.exists()]
    with _together(ranks, saving):
        if ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed
            aside.mkdir(parents=True)
    try:
        with _together(ranks, saving):
            yield aside
            for path in sorted(aside.rglob("*")):
                with suppress(FileNotFoundError):  # another rank's scratch file
                    sync_path(path)
        with _together(ranks, saving):
            if ranks.rank == 0:
                sync_path(aside)
                if folder.exists():  # away whole: a half deleted one would look complete
                    shutil.rmtree(replaced, ignore_errors=True)
                    folder.rename(replaced)
                aside.rename(folder)
                for parent in (folder, *new):
                    sync_path(parent.parent)
                shutil.rmtree(replaced, ignore_errors=True)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)


def delete_unfinished(parent: Path) -> None:
    """Delete the folders of `whole_folder` that a killed process left in `parent`."""
    for aside in parent.glob("*.aside"):
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _together(ranks: Ranks, saving: bool) -> Iterator[None]:
    """Make all ranks leave the block together: all succeed, or all raise."""
    try:
        yield
    except BaseException as error:
        ranks.agree(error, saving=saving)
        raise
    ranks.agree(saving=saving)
