"""Schedules of faults: files, drawing, and a run that gets well again."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simnet.faults import (
    KINDS,
    Kill,
    Replace,
    Schedule,
    check,
    draw,
    kind_of,
)  # fmt: skip
from simnet.simulate import run_seed, simulate
from swarm.errors import UserError
from tests.simnet.test_written import GOOD

NAMES = ["trainer", "validator-0", "worker-0", "worker-1"]


@given(st.integers(0, 2**32), st.integers(0, 30))
def test_a_schedule_is_drawn_within_its_time(seed: int, count: int) -> None:
    schedule = draw(Random(seed), NAMES, start=10.0, end=50.0, count=count)
    assert len(schedule) == count
    check(schedule, NAMES)
    for fault in schedule:
        assert 10.0 <= fault.at <= 50.0


def test_all_kinds_are_drawn_and_can_be_chosen() -> None:
    drawn = draw(Random(1), NAMES, start=0, end=1, count=500)
    assert {kind_of(fault) for fault in drawn} == set(KINDS)
    only = draw(Random(1), NAMES, start=0, end=1, count=20, kinds=["freeze"])
    assert {kind_of(fault) for fault in only} == {"freeze"}
    with pytest.raises(UserError, match="'flood' is none of crash, kill"):
        draw(Random(1), NAMES, start=0, end=1, count=1, kinds=["flood"])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('kind = "crash"\nat = 1\npeers = ["worker-9"]\nseconds = 2', "no peer named 'worker-9'"),
        ('kind = "crash"\nat = -1\npeers = ["trainer"]\nseconds = 2', ">= 0.0.*at"),
        ('kind = "crash"\nat = 1\npeers = ["trainer"]\nseconds = 0', "> 0.0.*seconds"),
        ('kind = "freeze"\nat = 1\npeers = ["trainer"]\nseconds = nan', "> 0.0.*seconds"),
        ('kind = "slow-disk"\nat = 1\npeers = []\nseconds = 1\nfactor = 0.5', ">= 1.0.*factor"),
        ('kind = "lossy"\nat = 1\npeers = ["trainer"]\nseconds = 1\nloss = 2', "< 1.0.*loss"),
        ('kind = "quake"\nat = 1\npeers = []', "quake"),
        ('kind = "crash"\nat = 1\npeers = []\nseconds = 2\ncolour = 1', "colour"),
        ('kind = "crash"\nat = "soon"\npeers = []\nseconds = 2', "at"),
    ],
)
def test_a_wrong_schedule_is_one_sentence(text: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "few.toml"
    path.write_text(f"{GOOD}[[fault]]\n{text}")
    with pytest.raises(UserError, match=what):
        simulate(str(path))


def test_a_schedule_for_other_peers_is_one_sentence() -> None:
    strange: Schedule = [Kill(at=1.0, seconds=1.0, peers=["x"])]
    with pytest.raises(UserError, match="no peer named 'x'"):
        simulate("mixed", seed=1, faults=strange)


@pytest.mark.slow
def test_newcomers_find_the_network_through_a_bootstrap_peer_that_was_away() -> None:
    """It comes back knowing nobody, and all others have given it up."""
    schedule: Schedule = [
        Kill(at=20.0, seconds=40.0, peers=["bootstrap"]),
        Kill(at=64.0, seconds=20.0, peers=["bootstrap"]),
        Replace(at=85.0, peers=["worker-0"]),
    ]
    report = simulate("mixed", seed=262, faults=schedule)
    assert report["violations"] == []


def test_a_run_is_well_again_after_faults_of_all_kinds() -> None:
    report = simulate("mixed", seed=1)
    assert report["violations"] == []
    assert report["figures"]["faults"] == 8
    assert report["figures"]["policies"] > report["figures"]["policies_before"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 25))
def test_mixed_faults(seed: int) -> None:
    result = run_seed("mixed", None, seed)
    assert result.violations == []
