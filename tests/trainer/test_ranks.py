"""Ranks agree with each other, and with one process alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers.trainer.durable import whole_folder
from peers.trainer.ranks import Place, RankError, Ranks
from swarm.errors import UserError
from tests.trainer.ranks_harness import run_ranks


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 6))
def test_every_sequence_has_one_rank_and_loads_are_even(lengths: list[int], world: int) -> None:
    shares = [
        Ranks(Place(rank, world, rank)).share(torch.tensor(lengths, dtype=torch.int64)).tolist()
        for rank in range(world)
    ]
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(lengths[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_ranks_that_no_copies_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"trainer.replicas is 3, which does not divide the 4"):
        Ranks(Place(0, 4, 0)).make_mesh(3)


def test_sums_and_errors_cross_ranks(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[list[float], list[float], str, bool, bool]:
        sums = ranks.sum([1.5, 10.0 * ranks.rank])
        largest = ranks.max([ranks.rank, -ranks.rank])
        ranks.agree()
        said = ""
        try:
            with whole_folder(tmp_path / "state", ranks) as aside:
                (aside / str(ranks.rank)).write_text("x")
                if ranks.rank == 1:
                    raise OSError("No space left on device")
        except (RankError, OSError) as error:
            said = str(error)
        gone = not (tmp_path / "state").exists()
        with whole_folder(tmp_path / "state", ranks) as aside:
            (aside / str(ranks.rank)).write_text("x")
        there = sorted(path.name for path in (tmp_path / "state").iterdir()) == ["0", "1"]
        return sums, largest, said, gone, there

    for result in run_ranks(2, tmp_path, work):
        assert result == (
            [3.0, 10.0],
            [1.0, 0.0],
            "rank 1 of 2: OSError: No space left on device",
            True,
            True,
        )
