"""Thresholds of a run whose environments have temperatures of their own."""

from __future__ import annotations

from pathlib import Path

from peers.calibration.calibrate import measure_run
from peers.engines import demo
from peers.environments.sort_digits import SortDigits
from swarm.wire.manifest import Sampling, Thresholds

SAMPLING = Sampling(max_new_tokens=4, stop_ids=[2], group_size=2)


def test_thresholds_cover_every_temperature_of_a_run(tmp_path: Path) -> None:
    demo.make_policy(tmp_path, seed=1)

    def measured(*temperatures: float) -> Thresholds:
        return measure_run(
            tmp_path, [SortDigits()], SAMPLING, ["float32", "bfloat16"],
            lambda _line: None, lambda _done, _all: None, temperatures,
        ).thresholds  # fmt: skip

    one, both = measured(), measured(1.0, 0.5, 1.0)
    assert 1.5 * one.measured_tokens < both.measured_tokens < 2.5 * one.measured_tokens
