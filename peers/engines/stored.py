"""Files of tensors, as readable as the folder that they are in."""

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors in the form that transformers reads."""
    safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})
    readable_as_folder(path)


def readable_as_folder(path: Path) -> None:
    """Let those read a file who may read its folder: safetensors makes files for their owner alone,
    and the folder of a policy is there to be copied and served."""
    path.chmod(0o600 | (path.parent.stat().st_mode & 0o044))
