"""Reads this rank's share of an accepted submission's rollouts.

The file is on a disk that every rank can access. One rank reads and checks all of it; every other
rank reads the offsets, and the tokens of its own sequences."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor

from peers.learning.batch import AcceptedGroups, check_rewards, share_rows, trained_rows
from peers.learning.ranks import Ranks
from swarm.jobs.training import AcceptedSubmission
from swarm.rollouts.rollouts import FINISHES, MODEL, Rollouts, check_digest


def check_file(submission: AcceptedSubmission) -> None:
    """Check a file for all ranks (a copy may be damaged); raises `OSError` or `ValueError`."""
    raw = Path(submission.path).read_bytes()
    check_digest(raw, submission.rollouts_digest)
    Rollouts.from_bytes(raw)


def read_groups(submission: AcceptedSubmission, ranks: Ranks) -> AcceptedGroups:
    """This rank's share of a checked file, one reward a row; raises `OSError` or `ValueError`."""
    try:
        with safetensors.safe_open(submission.path, framework="numpy") as file:
            return _read(file, submission, ranks)
    except safetensors.SafetensorError as error:
        raise ValueError(f"these bytes are no rollouts ({error})") from error


def _read(file: Any, submission: AcceptedSubmission, ranks: Ranks) -> AcceptedGroups:
    token_offsets, model_offsets, segment_offsets, span_offsets = (
        file.get_tensor(f"{name}_offsets") for name in ("token", "model", "segment", "span")
    )
    rewards, kept, name = submission.rewards, submission.kept, submission.digest.hex()
    check_rewards(rewards, kept, len(token_offsets) - 1)
    lengths = torch.from_numpy(np.diff(token_offsets))
    cut_off = torch.from_numpy(_truncated(file, segment_offsets))
    left_out = cut_off if submission.leaves_out_truncated else None
    trained = trained_rows(rewards, kept, any_reward=submission.any_reward, left_out=left_out)
    rows = share_rows(name, rewards, trained, lengths, ranks)

    def mine(array: str, offsets: Any) -> Tensor:
        """The rows' values in a flat array; neighbouring rows are read together."""
        flat = file.get_slice(array)
        parts = [flat[int(offsets[low]) : int(offsets[high])] for low, high in _runs(rows)]
        return torch.from_numpy(np.concatenate(parts) if parts else flat[:0])

    kinds = mine("segment_kinds", segment_offsets) == MODEL
    environment = torch.from_numpy(file.get_tensor("environment")).long()
    temperatures = torch.tensor(submission.temperatures, dtype=torch.float64)
    return AcceptedGroups(
        name=name,
        policies=np.unique(file.get_tensor("span_policies")).tolist(),
        environment=environment,
        truncated=cut_off,
        temperature=temperatures[environment[rows]],
        rewards=rewards,
        trained=trained,
        ungraded=submission.ungraded,
        parts=submission.parts,
        all_completion_lengths=torch.from_numpy(np.diff(model_offsets)),
        rows=rows,
        tokens=mine("tokens", token_offsets),
        sampled=kinds.repeat_interleave(mine("segment_lengths", segment_offsets)),
        lengths=lengths[rows],
        token_policies=mine("span_policies", span_offsets)
        .long()
        .repeat_interleave(mine("span_lengths", span_offsets)),
        reported=mine("log_probabilities", model_offsets),
    )


def _truncated(file: Any, segment_offsets: Any) -> Any:
    """Whether the length limit cut off each sequence, bool [all]: only its last segment can say."""
    return file.get_tensor("segment_finishes")[segment_offsets[1:] - 1] == FINISHES.index("length")


def _runs(rows: Tensor) -> Iterator[tuple[int, int]]:
    """Ascending indices as ranges (first, behind the last)."""
    if not len(rows):
        return
    ends = (rows.diff() != 1).nonzero()[:, 0] + 1
    for run in rows.tensor_split(ends):
        yield int(run[0]), int(run[-1]) + 1
