"""A folder and its manifest: the one in it, or a new one."""

from __future__ import annotations

import json
from pathlib import Path

from swarm.errors import UserError, leaf_errors
from swarm.shardcast import limits
from swarm.shardcast.manifest import (
    MANIFEST_NAME,
    BadManifest,
    CheckpointManifest,
    build,
    parse,
)
from swarm.world.disk import LocalDisk

NO_RUN = "nobody/published"
"""The run id of a checkpoint that belongs to no run."""


async def describe(folder: Path) -> tuple[CheckpointManifest, bytes]:
    """The manifest of a folder, and its blob: the one in the folder, else a new one.

    Raises `UserError` for an unusable folder.
    """
    try:
        own = own_manifest(folder)
        if own is not None:
            return own
        place = _check_contents(folder)
        manifest = await build(LocalDisk(place.parent), place.name, run=NO_RUN, lineage=0, step=0)
    except BadManifest as error:
        raise UserError(f"{folder} cannot be published: {error}") from error
    except (OSError, ExceptionGroup) as error:
        for cause in leaf_errors(error):
            if isinstance(cause, OSError):
                raise UserError(
                    f"{cause.filename or folder} cannot be read ({cause.strerror})"
                ) from error
        raise
    return manifest, manifest.encode()


def read_bounded(path: Path) -> bytes:
    """Read a manifest file; of an oversized one, just enough for `parse` to refuse it.

    Raises `OSError`.
    """
    with path.open("rb") as file:
        return file.read(limits.CHECKPOINT_MANIFEST_BYTES_MAX + 1)


def own_manifest(folder: Path) -> tuple[CheckpointManifest, bytes] | None:
    """The manifest in a folder, and its blob; None if it has none.

    Raises `UserError` if the folder's files do not have the sizes that it states.
    """
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
