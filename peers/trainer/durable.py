"""Folders that are either wholly there or not there at all, also after a power cut."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`; on success make it durable and give it that name.

    A folder already there is replaced. If the block raises, nothing of it is left.
    """
    aside = folder.with_name(folder.name + ".aside")
    shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed
    new = [parent for parent in folder.parents if not parent.exists()]
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in sorted(aside.rglob("*")):
            _sync(path)
        _sync(aside)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
        for parent in (folder, *new):
            _sync(parent.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
