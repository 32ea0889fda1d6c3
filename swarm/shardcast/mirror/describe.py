"""The manifest of a folder: the one in it, or a new one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from swarm.errors import UserError, leaf_errors
from swarm.shardcast import limits
from swarm.shardcast.manifest import (
    MANIFEST_NAME,
    BadManifest,
    CheckpointManifest,
    build,
    is_mirror,
    parse,
)
from swarm.shardcast.mirror.index import is_run
from swarm.world.disk import LocalDisk

NO_RUN = "nobody/published"
"""The run id of a checkpoint that belongs to no run."""


async def describe(
    folder: Path,
    *,
    run: str | None = None,
    lineage: int | None = None,
    step: int | None = None,
    mirrors: Sequence[str] = (),
) -> tuple[CheckpointManifest, bytes]:
    """The manifest of a folder, and its blob: the one in the folder, or a new one from the
    arguments.

    Raises `UserError` for an unusable folder or mirror's address, and if the folder's own manifest
    contradicts an argument.
    """
    for mirror in mirrors:
        if not is_mirror(mirror):
            raise UserError(f"--mirror {mirror!r} is no http:// or https:// address")
    if run is not None and not is_run(run):
        raise UserError(f"--run {run[:80]!r} is no run's id; write it like lab/model")
    try:
        own = own_manifest(folder)
        if own is not None:
            _refuse_other(folder, own[0], run, lineage, step, mirrors)
            return own
        place = _check_contents(folder)
        disk = LocalDisk(place.parent)
        manifest = await build(
            disk,
            place.name,
            run=NO_RUN if run is None else run,
            lineage=lineage or 0,
            step=step or 0,
        )
    except BadManifest as error:
        raise UserError(f"{folder} cannot be published: {error}") from error
    except (OSError, ExceptionGroup) as error:
        cause = disk_error(error)
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
    """Refuse options that contradict a folder's own manifest."""
    for flag, given, stated in (
        ("--run", run, own.run),
        ("--lineage", lineage, own.lineage),
        ("--step", step, own.step),
        ("--mirror", list(mirrors) or None, own.mirrors),
    ):
        if given is not None and given != stated:
            raise UserError(
                f"{folder} has a manifest of its own (policy {own.step} of {own.run}), which "
                f"{flag} cannot change; leave it out"
            )


def read_bounded(path: Path) -> bytes:
    """Read a manifest file; of an oversized one, just enough for `parse` to refuse it.

    Raises `OSError`.
    """
    with path.open("rb") as file:
        return file.read(limits.CHECKPOINT_MANIFEST_BYTES_MAX + 1)


def disk_error(error: OSError | ExceptionGroup[Exception]) -> OSError:
    """The `OSError` in an exception group; any other group is raised again."""
    for leaf in leaf_errors(error):
        if isinstance(leaf, OSError):
            return leaf
    raise error


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
    return UserError(f"{path} is not what its manifest says; `swarm checkpoint verify` tells where")


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
