"""Several trainers in the simulator: newcomers, deaths and partitions end in one state."""

from __future__ import annotations

from simnet.simulate import simulate


def test_two_trainers_that_lose_each_other_end_in_one_state() -> None:
    """The second begins late; the first dies once; then neither hears the other for two rounds."""
    report = simulate("several-trainers", peers=2, seed=1)
    assert report["violations"] == []
    figures = report["figures"]
    assert figures["run_complete"] == 2
    assert figures["branch_lost"] >= 1  # by the partition
    assert figures["alone"] >= 1
