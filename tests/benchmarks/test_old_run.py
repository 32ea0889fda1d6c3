"""A small run that grows old: nothing that its peers hold grows with it, and both resume."""

from __future__ import annotations

import pytest

from benchmarks.old_run import Sample, Size, measure
from tests.benchmarks.test_month import lower_bounds

STEPS, EPOCHS_MIN = 60, 6


@pytest.mark.slow
def test_nothing_grows_with_the_submissions(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_bounds(monkeypatch, 10)
    per_step = 20
    size = Size(
        submissions=STEPS * per_step, per_step=per_step, workers=5, stake_steps=1,
        epoch_entries=200, samples=12,
    )  # fmt: skip
    old = measure(size)
    assert old.steps == STEPS and old.samples[-1].epochs >= EPOCHS_MIN
    # Each half spans several epochs, at whose ends most is pruned.
    early, late = old.samples[2:7], old.samples[7:]
    for name in ("trainer", "validator"):
        assert most(late, "rows", name) <= 1.1 * most(early, "rows", name)
        assert most(late, "disk_bytes", name) <= 1.1 * most(early, "disk_bytes", name)
    # Both have resumed, and go on.
    assert [len(each) for each in old.resume.values()] == [2, 2]


def most(samples: list[Sample], quantity: str, name: str) -> float:
    return max(getattr(each, quantity)[name] for each in samples)
