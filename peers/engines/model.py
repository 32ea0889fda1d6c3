"""A policy is a plain Hugging Face folder: config.json, tokenizer.json, safetensors weights.

Or an adapter's (`peers.engines.adapter`), whose base's weights are read with it merged in."""

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from peers.engines.adapter import Adapter
from peers.engines.adapter_config import base_of, is_adapter
from peers.engines.experts import fuse_experts
from peers.engines.stored import readable_as_folder, save_tensors
from peers.engines.tokenizer import copy_tokenizer
from swarm.errors import UserError

INDEX_FILE = "model.safetensors.index.json"
STORED = frozenset({"F64", "F32", "F16", "BF16"})
"""Formats of weights that are not quantised, by their names in safetensors."""

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, or of an adapter's base, sorted.

    They are `model.safetensors` or those that the index names, as in transformers; without either,
    all. Raises `UserError` when there are none, or one is missing. Pickled weights, which can run
    any code while they load, are never opened."""
    folder = base_of(folder)
    whole, index = folder / "model.safetensors", folder / INDEX_FILE
    if whole.exists():
        return [whole]
    if index.exists():
        return _indexed_files(index)
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLE_SUFFIXES)
    if pickled:
        raise UserError(
            f"{folder} holds pickled weights ({pickled[0]}), which are refused because they can "
            "run code; convert them to safetensors"
        )
    raise UserError(f"{folder} holds no safetensors weights")


def _indexed_files(index: Path) -> list[Path]:
    """The files that an index of safetensors names; raises `UserError`."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [index.parent / name for name in names]
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} is no index of safetensors files ({error}); get it again"
        ) from error
    for name, path in zip(names, files, strict=True):
        if Path(name).name != name or path.suffix != ".safetensors":
            raise UserError(f"{index} names {name[:100]!r}, which is no safetensors file beside it")
        if not path.exists():
            raise UserError(f"{index} names {name}, which is missing; get the whole model again")
    if not files:
        raise UserError(f"{index} names no file; get it again")
    return files


def read_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Adapter | None:
    """The adapter in `folder`, or None; raises `UserError`. `shapes`: the base's, if not stored."""
    return Adapter(folder, shapes or open_weights(folder)[1]) if is_adapter(folder) else None


def read_weights(
    folder: Path, *, merge: bool = True, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """All tensors of a model folder by name, on the CPU, in their stored dtype.

    The experts of a layer are one tensor (`fuse_experts`). Of an adapter they are its base's, with
    the adapter merged unless `merge` is false, in `dtype` or the stored one. Raises `UserError`
    when a file is missing or broken."""
    adapter = read_adapter(folder) if merge else None
    weights: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            weights.update(safetensors.torch.load_file(path))
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{path} is no safetensors file ({error})") from error
    if adapter is not None:
        weights = {name: adapter.merged(name, weight, dtype) for name, weight in weights.items()}
    return fuse_experts(weights)


@contextmanager
def merged_folder(folder: Path, dtype: torch.dtype) -> Iterator[Path]:
    """A folder with the whole model of a policy, for engines that read files themselves.

    It is the policy's own, or, for an adapter, a temporary one with the sums in `dtype`, made file
    by file.
    Raises `UserError`, also if the disk of temporary files has no room."""
    adapter = read_adapter(folder)
    if adapter is None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="swarm-merged-") as name:
        aside = Path(name)
        # Sums in fp32 of weights in 16 bits take twice their room.
        wider = max(1, dtype.itemsize // 2)
        needed = wider * sum(path.stat().st_size for path in weight_files(folder))
        free = shutil.disk_usage(aside).free
        if needed > free:
            raise _no_room(folder, aside, f"{free / 1e9:.1f} of {needed / 1e9:.1f} GB are free")
        try:
            _write_merged(adapter, folder, aside, dtype)
        except (OSError, safetensors.SafetensorError) as error:
            raise _no_room(folder, aside, str(error)) from error
        yield aside


def _write_merged(adapter: Adapter, folder: Path, aside: Path, dtype: torch.dtype) -> None:
    for path in weight_files(folder):
        weights = safetensors.torch.load_file(path)
        merged = {each: adapter.merged(each, weight, dtype) for each, weight in weights.items()}
        safetensors.torch.save_file(merged, aside / path.name, metadata={"format": "pt"})
    for path in (base_of(folder) / INDEX_FILE, folder / "config.json"):
        if path.exists():
            shutil.copyfile(path, aside / path.name)


def _no_room(folder: Path, aside: Path, why: str) -> UserError:
    return UserError(
        f"the base and the adapter in {folder} could not be merged in {aside} ({why}); vLLM reads "
        "whole models only: set TMPDIR to a folder with room for one, or free some space"
    )


def open_weights(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True, stored: Set[str] = STORED
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The wanted tensors' open files and shapes, of an adapter its base's; raises `UserError`."""
    files: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        try:
            file: Any = safetensors.safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                if not wanted(name):
                    continue
                values = file.get_slice(name)
                if values.get_dtype() not in stored:
                    raise UserError(
                        f"{name} in {folder} is stored as {values.get_dtype()}; quantised weights "
                        "are refused, because validators compute with the trainer's own"
                    )
                files[name] = file
                shapes[name] = tuple(values.get_shape())
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{path} is no safetensors file ({error})") from error
    return files, shapes


class StoredTensors:
    """Tensors of a model folder, an adapter merged, by published name, read one at a time."""

    def __init__(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        """Read the files' headers, and the adapter; raises `UserError`."""
        self._files, self.shapes = open_weights(folder, wanted)
        self._adapter = read_adapter(folder)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in its stored dtype."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor if self._adapter is None else self._adapter.merged(name, tensor)

    def dtype_name(self, name: str) -> str:
        """A tensor's dtype as the file names it, such as `BF16`."""
        return str(self._files[name].get_slice(name).get_dtype())


def save(model: Any, folder: Path, tokenizer_from: Path) -> None:
    """Save a transformers model to `folder`, with the tokenizer files of `tokenizer_from`."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    for path in folder.glob("*.safetensors"):
        readable_as_folder(path)
    if tokenizer_from.resolve() == folder.resolve():
        return
    copy_tokenizer(tokenizer_from, folder)


def save_share(
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    config: Any,
    base: Path,
    rank: int,
    owners: Mapping[str, int],
) -> None:
    """Write one rank's share of a policy's weights to `folder`; rank 0 adds all other files.

    `owners` maps each tensor to the rank that writes it. If rank 0 owns all of them, the file
    is `model.safetensors`; otherwise rank r writes file r + 1 of a sharded Hugging Face checkpoint.
    The tokenizer comes from `base`, the dtype in the config from the weights."""
    dtype = next((value.dtype for value in weights.values()), None)
    ranks = 1 + max(owners.values())
    files = ["model.safetensors"]
    if ranks > 1:
        files = [f"model-{each + 1:05}-of-{ranks:05}.safetensors" for each in range(ranks)]
    if weights:
        contiguous = {name: value.contiguous() for name, value in weights.items()}
        save_tensors(contiguous, folder / files[rank])
    if rank != 0:
        return
    if ranks > 1:
        index = {
            "metadata": {},
            "weight_map": {name: files[owner] for name, owner in owners.items()},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=1))
    config = copy.deepcopy(config)
    config.dtype = dtype
    vars(config).pop("auto_map", None)  # programs of the base's folder, which are not here
    config.save_pretrained(folder)
    copy_tokenizer(base, folder)


def count_parameters(model: torch.nn.Module) -> int:
    """The number of trainable parameters; tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())
