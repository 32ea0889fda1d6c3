"""The DHT and gossip alone, with a few dozen peers: found, heard, and the same again."""

from __future__ import annotations

import pytest

from benchmarks.protocols import measure_dht, measure_gossip
from benchmarks.simulator import costs, run_scenario
from simnet.links import mix, travel_seconds


@pytest.mark.slow
def test_records_are_found_in_calm_in_churn_and_after_half_have_left() -> None:
    figures = measure_dht(24, records=8, lookups=40, churn_seconds=60.0)
    assert figures["lookups_found"] == 1.0
    assert figures["lookups_found_in_churn"] >= 0.95
    assert figures["records_after_half_left"] == 1.0
    assert 1 <= figures["hops_median"] <= 3


def test_everybody_hears_every_announcement_though_packets_are_lost() -> None:
    figures = measure_gossip(24, announcements=3)
    assert figures["heard_by_everybody"] == figures["announcements"] == 3
    assert figures["coverage"] == 1.0
    assert 0.05 < figures["delay_seconds"]["median"] < figures["delay_seconds"]["max"] < 10.0
    assert measure_gossip(24, announcements=3) == figures
    assert measure_gossip(24, seed=2, announcements=3) != figures


def test_lost_packets_cost_retransmissions_as_often_as_they_should() -> None:
    draws = [mix(number) for number in range(20_000)]
    times = [travel_seconds(0.1, 0.1, 0.05, draw) for draw in draws]
    assert all(time >= 0.1 for time in times)
    late = [time for time in times if time > 0.11]
    assert len(late) / len(times) == pytest.approx(0.05, rel=0.1)
    assert sum(time > 0.11 + 0.4 for time in late) / len(late) == pytest.approx(0.05, rel=0.4)
    calm = [travel_seconds(0.1, 0.1, 0.0, draw) for draw in draws]
    assert sum(calm) / len(calm) == pytest.approx(0.105, rel=0.01)


@pytest.mark.slow
def test_a_steady_run_violates_nothing_and_its_costs_are_measured() -> None:
    report = run_scenario("steady", 24, 1)
    assert report["violations"] == []
    figures = report["figures"]
    assert figures["lookups_found"] == figures["lookups"]
    assert figures["submissions"] > 0 and figures["steps"] > 0
    assert 0 < report["virtual_seconds"] <= 301
    assert report["cpu_seconds"] < report["whole"]["cpu_seconds"]


def test_costs_are_rates_of_processor_time() -> None:
    figures = costs(virtual=10.0, cpu=2.0, messages=1000)
    assert figures["times_real_time"] == 5.0
    assert figures["messages_per_second"] == 500
    assert figures["cpu_microseconds_per_message"] == 2000
