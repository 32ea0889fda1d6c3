"""`python -m benchmarks.attacks`: what one run gives, and what several give together."""

from __future__ import annotations

import pytest

from benchmarks.attacks import measure, summary
from tests.attacks.hostile import Setting


@pytest.mark.slow
def test_an_unparsable_file_costs_its_identity_and_gains_nothing() -> None:
    row = summary([measure(Setting("malformed-files", 2, seconds=45.0))])
    assert row["detected"] == row["refused"] == 1.0
    assert row["net_gain"] < 0 and row["tokens_until_eviction"] > 0
    assert row["honest_refused"] == 0 and row["violations"] == []
    assert row["pace"] >= 0.8


def test_seeds_are_put_together() -> None:
    run = {
        "kind": "editor", "count": 2, "pace": 1.0, "violations": [], "identities": 2, "evicted": 1,
        "seconds": [20.0], "refused": 0.5, "generated": 100, "credited": 30, "honest_refused": 0,
    }  # fmt: skip
    row = summary([run, {**run, "pace": 0.9, "evicted": 2, "seconds": [10.0, 40.0]}])
    assert (row["seeds"], row["pace_min"], row["detected"]) == (2, 0.9, 0.75)
    assert (row["seconds_until_eviction"], row["tokens_until_eviction"]) == (20.0, None)
    assert row["net_gain"] == -70
