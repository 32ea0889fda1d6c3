from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.transfer import NO_SHARDCAST, Round, compare, sum_up


def taken(**seconds: float) -> Round:
    return {kind: {"seconds": each, "cpu_seconds_per_gb": 1.0} for kind, each in seconds.items()}


def test_shares_are_medians_round_by_round_and_null_where_nothing_was_measured() -> None:
    shares = compare([taken(bare=0.5, checked=1.0, swarm=2.0)])
    assert shares["speedup_over_shardcast"] is None
    assert shares["share_of_bare"] == 0.25 and shares["share_of_checked"] == 0.5
    rounds = [
        taken(swarm=1.0, shardcast=6.7),  # the best one
        taken(swarm=2.0, shardcast=4.0),
        taken(swarm=5.0, shardcast=5.0),
    ]
    shares = compare(rounds)
    assert shares["speedup_over_shardcast"] == 2.0
    assert shares["speedup_over_shardcast_least"] == 1.0
    assert shares["speedup_over_shardcast_most"] == 6.7
    summed = sum_up(rounds, 4 << 20)["swarm"]
    assert (summed["seconds"], summed["seconds_least"], summed["seconds_most"]) == (2.0, 1.0, 5.0)
    assert summed["mib_per_second"] == 2


@pytest.mark.slow
def test_it_says_how_to_get_the_speedup_that_it_did_not_measure() -> None:
    environment = {name: text for name, text in os.environ.items() if name != "SHARDCAST_PATH"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.transfer", "--mib", "1", "--repeat", "1"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["speedup_over_shardcast"] is None
    assert done.stderr.splitlines()[0] == NO_SHARDCAST
    assert report["mib"] == 1
    for clients in ("clients_1", "clients_4"):
        assert set(report[clients]) == {"bare", "checked", "swarm"}
        for figures in report[clients].values():
            assert figures["seconds"] > 0
            assert figures["cpu_seconds_per_gb"] >= 0
    for kind in ("bare", "checked"):
        assert report[f"share_of_{kind}"] > 0
