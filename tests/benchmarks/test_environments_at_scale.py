"""Environment peers with a few dozen workers: shared load, a death, and a greedy worker."""

from __future__ import annotations

from benchmarks.environments_at_scale import Setting, measured
from peers.environment.role import BURST_SECONDS


def test_two_share_the_load_and_one_that_dies_is_taken_over() -> None:
    setting = Setting(workers=6, peers=3, children=2, dies=True, settle=60.0, measured=150.0)
    figures = measured(setting)
    assert set(figures["calls_per_second"]) == {"environment-1", "environment-2"}
    assert min(figures["calls_per_second"].values()) > 0, "both go on"
    assert figures["workers_given_turns"] == 6, "also those of the dead peer"
    assert figures["wait_seconds"]["median"] < 1.0
    assert 25.0 < figures["wait_seconds"]["most"] < 60.0, "until the dead peer counts as silent"
    assert set(figures["outcomes"]) == {"accepted"}


def test_a_greedy_worker_gets_its_quota_and_delays_nobody() -> None:
    setting = Setting(workers=6, children=2, quota=4.0, greedy=True, settle=30.0, measured=60.0)
    figures = measured(setting)
    assert figures["workers_given_turns"] == 6
    assert figures["wait_seconds"]["p99"] < 1.0
    burst = BURST_SECONDS / setting.measured
    assert 2.0 < figures["greedy_turns_per_second"] < (1 + burst) * setting.quota
    assert figures["requests_dropped"] > 0
    assert set(figures["outcomes"]) == {"accepted"}
