"""What `benchmarks.broadcast` prints, of broadcasts that take a second, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.broadcast import measure, parse, published
from benchmarks.swarmcast import bound, headline


def printed(*arguments: str) -> Any:
    return json.loads(json.dumps(measure(parse(["--gb", "0.01", *arguments]))))


@pytest.mark.slow
def test_each_seed_has_its_ratio_to_the_binding_bound() -> None:
    report = printed("--peers", "10", "--seeds", "2", "--first-seed", "3")
    assert report["peers"] == 10
    assert report["checkpoint_bytes"] == 10_000_000
    assert [run["seed"] for run in report["runs"]] == [3, 4]
    assert report["ratio_to_bound"] == [run["ratio_to_bound"] for run in report["runs"]]
    assert report["binding_term"] == report["runs"][0]["binding_term"] == "capacity"
    for run in report["runs"]:
        assert run["ratio_to_bound"] == pytest.approx(
            run["worst_seconds"] / run["bound_seconds"], rel=0.01
        )
        assert run["median_seconds"] <= run["worst_seconds"]
        for times in (run, run["published"], run["random_mesh"]):
            assert times["ratio_to_bound"] >= 1


def test_relay_only_stands_beside_the_published_design_alone() -> None:
    report = printed("--peers", "6", "--seeds", "1", "--mode", "relay-only")
    (run,) = report["runs"]
    assert report["mode"] == "relay-only"
    assert run["ratio_to_bound"] >= 1
    assert run["published"]["ratio_to_bound"] >= 1
    assert "random_mesh" not in run


def test_the_published_design_uses_the_relays_that_there_are() -> None:
    """By the fastest of the receivers it would take more than twice as long."""
    case = headline(20, 1, size_bytes=62 * 10**9, relay_only=True)
    times = published(case)
    assert len(times) == 20
    assert 1 <= times[-1] / max(bound(case).values()) < 1.2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--peers 0", "argument --peers: '0' is no whole number from 1 on"),
        ("--growth 10,0", "argument --growth: '0' is no whole number from 1 on"),
        ("--growth 10,5 --mode relay-only", "--growth 5: relay-only mode takes at least 6 "),
        ("--churn 2", "--churn 2: of 100 receivers at least one must stay"),
        ("--churn 0.96 --peers 10", "--churn 0.96: of 10 receivers at least one must stay"),
        ("--plot missing/it.png", "--plot missing/it.png cannot be written: there is no folder"),
        ("--plot it.xyz", "--plot it.xyz must end with .png or .svg or .pdf"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(arguments: str, said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(arguments.split())
    assert refused.value.code == 2
    assert said in capsys.readouterr().err
