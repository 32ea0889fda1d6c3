"""The canonical form of a submission's rollouts: plain arrays.

They pass from the process that parsed the hostile file to those that recompute and train, so that
one token array per completion serves proof, reward and training.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

Integers = NDArray[np.int32]
Floats = NDArray[np.float32]
Offsets = NDArray[np.int64]


@dataclass(frozen=True)
class Rollouts:
    """R completions with their prompts. Lists lie end to end: those of row i are at
    `offsets[i] : offsets[i + 1]`."""

    group: Integers
    """[R]."""
    sample: Integers
    """[R]."""
    target_length: Integers
    """[R]."""
    prompt_tokens: Integers
    prompt_offsets: Offsets
    """[R + 1], the first 0."""
    completion_tokens: Integers
    completion_offsets: Offsets
    """[R + 1], the first 0; also of the log-probabilities."""
    log_probabilities: Floats
    proofs: NDArray[np.uint8]
    proof_offsets: Offsets
    """[R + 1], the first 0; in bytes."""

    @classmethod
    def from_lists(
        cls,
        *,
        group: Sequence[int],
        sample: Sequence[int],
        target_length: Sequence[int],
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        log_probabilities: Sequence[Sequence[float]],
        proofs: Sequence[bytes],
    ) -> Rollouts:
        """Rollouts row by row; raises `ValueError` when the rows do not agree."""
        result = cls(
            group=np.array(group, np.int32),
            sample=np.array(sample, np.int32),
            target_length=np.array(target_length, np.int32),
            prompt_tokens=np.array(list(itertools.chain(*prompts)), np.int32),
            prompt_offsets=_offsets(prompts),
            completion_tokens=np.array(list(itertools.chain(*completions)), np.int32),
            completion_offsets=_offsets(completions),
            log_probabilities=np.array(list(itertools.chain(*log_probabilities)), np.float32),
            proofs=np.frombuffer(b"".join(proofs), np.uint8),
            proof_offsets=_offsets(proofs),
        )
        if any(len(a) != len(b) for a, b in zip(completions, log_probabilities, strict=True)):
            raise ValueError("a completion has not as many log-probabilities as tokens")
        result._check()
        return result

    def __len__(self) -> int:
        return len(self.group)

    def prompt(self, row: int) -> list[int]:
        """Token ids."""
        values: list[int] = _part(self.prompt_tokens, self.prompt_offsets, row).tolist()
        return values

    def completion(self, row: int) -> list[int]:
        """Token ids, the stop token included."""
        values: list[int] = _part(self.completion_tokens, self.completion_offsets, row).tolist()
        return values

    def row_log_probabilities(self, row: int) -> list[float]:
        """One a completion token, as the worker's engine reports them."""
        values: list[float] = _part(self.log_probabilities, self.completion_offsets, row).tolist()
        return values

    def proof(self, row: int) -> bytes:
        """The row's proofs, one after the other."""
        return _part(self.proofs, self.proof_offsets, row).tobytes()

    def to_bytes(self) -> bytes:
        """As safetensors: arrays by name, nothing that could run."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        return bytes(safetensors.numpy.save(arrays))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Rollouts:
        """What `to_bytes` wrote; raises `ValueError` for anything else."""
        try:
            arrays = safetensors.numpy.load(raw)
        except safetensors.SafetensorError as error:
            raise ValueError(f"these bytes are no rollouts ({error})") from error
        if {name: array.dtype for name, array in arrays.items()} != _ARRAYS:
            raise ValueError("these arrays are no rollouts")
        if any(array.ndim != 1 for array in arrays.values()):
            raise ValueError("an array of rollouts is not flat")
        result = cls(**arrays)
        result._check()
        return result

    def _check(self) -> None:
        rows = len(self.group)
        if len(self.sample) != rows or len(self.target_length) != rows:
            raise ValueError("columns of rollouts differ in length")
        for offsets, flat in (
            (self.prompt_offsets, self.prompt_tokens),
            (self.completion_offsets, self.completion_tokens),
            (self.completion_offsets, self.log_probabilities),
            (self.proof_offsets, self.proofs),
        ):
            if len(offsets) != rows + 1 or offsets[0] != 0 or offsets[-1] != len(flat):
                raise ValueError("offsets of rollouts do not fit their values")
            if (offsets[1:] < offsets[:-1]).any():
                raise ValueError("offsets of rollouts run backwards")


_ARRAYS: dict[str, np.dtype[Any]] = {
    "group": np.dtype(np.int32),
    "sample": np.dtype(np.int32),
    "target_length": np.dtype(np.int32),
    "prompt_tokens": np.dtype(np.int32),
    "prompt_offsets": np.dtype(np.int64),
    "completion_tokens": np.dtype(np.int32),
    "completion_offsets": np.dtype(np.int64),
    "log_probabilities": np.dtype(np.float32),
    "proofs": np.dtype(np.uint8),
    "proof_offsets": np.dtype(np.int64),
}


def _offsets(rows: Sequence[Sequence[Any] | bytes]) -> Offsets:
    return np.concatenate(([0], np.cumsum([len(row) for row in rows], dtype=np.int64))).astype(
        np.int64
    )


def _part(flat: NDArray[Any], offsets: Offsets, row: int) -> NDArray[Any]:
    return flat[offsets[row] : offsets[row + 1]]
