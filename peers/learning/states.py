"""The trainer's own state on disk: torch's distributed checkpoint, in safetensors, without pickle.

Every rank writes its part into one folder, which all ranks must see. Any number of ranks can read
it again. `state.json` holds all but tensors. The folder gets its name once all is durable."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from peers.learning.durable import whole_folder
from peers.learning.ranks import Ranks
from peers.learning.state_format import STATE_FILE, STATE_VERSION
from swarm.errors import DiskFullError, UserError

_DISK_FULL = ("No space left on device", "Disk quota exceeded", "File too large")


def write(folder: Path, tensors: dict[str, Tensor], facts: Mapping[str, Any], ranks: Ranks) -> None:
    """Write durably or not at all; raises `DiskFullError`, `OSError`, or another's `RankError`."""
    try:
        with whole_folder(folder, ranks, saving=True) as aside:
            with _alone_on_purpose():
                save(
                    tensors,
                    storage_writer=HuggingFaceStorageWriter(str(aside), save_distributed=True),
                    process_group=ranks.saving_group,
                    no_dist=ranks.world == 1,
                )
            if ranks.rank == 0:
                text = json.dumps({"version": STATE_VERSION, **facts}, indent=1)
                (aside / STATE_FILE).write_text(text)
    except (CheckpointException, safetensors.SafetensorError, OSError) as error:
        if any(words in str(error) for words in _DISK_FULL):
            raise DiskFullError(
                f"{folder} cannot be written, the disk is full; free some space, then start the "
                "trainer again with --resume: the state before it is whole"
            ) from error
        raise OSError(f"{folder} cannot be written ({_first_line(error)})") from error


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts that `write` stored beside the tensors; raises `UserError`."""
    try:
        facts = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"trainer state {folder} cannot be read ({error})") from error
    if not isinstance(facts, dict) or facts.get("version") != STATE_VERSION:
        found = facts.get("version") if isinstance(facts, dict) else None
        raise UserError(
            f"trainer state {folder} has version {found}; "
            f"this program reads version {STATE_VERSION}"
        )
    return facts


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a state; raises `UserError`."""
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise UserError(f"trainer state {folder} cannot be read ({error})") from error
    return {
        name: tuple(getattr(entry, "size", ()))
        for name, entry in metadata.state_dict_metadata.items()
    }


def read(folder: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Fill tensors in place with the state's tensors of the same names; raises `UserError`."""
    try:
        with _alone_on_purpose():
            load(
                tensors,
                storage_reader=HuggingFaceStorageReader(str(folder)),
                no_dist=ranks.world == 1,
            )
    except (CheckpointException, OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"trainer state {folder} cannot be read ({_first_line(error)})") from error


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _first_line(error: BaseException) -> str:
    """First line of an error; a checkpoint's error carries the traces of all ranks."""
    causes = getattr(error, "failures", None)
    if causes:
        error = next(iter(causes.values()))[0]
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
