"""The comparison of several trainers with synchronous training, made small."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from benchmarks import diloco

SMALL = ["--trainers", "2", "--batch", "1", "--sequence-tokens", "9", "--characters", "10000"]
SMALL += ["--pretraining-steps", "1", "--steps", "4"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["diloco", *SMALL, *arguments])
    diloco.main()


@pytest.mark.slow
def test_each_case_has_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--inner-steps", "1,2", "--variants", "synchronous,fp32")
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(report) == {"synchronous", "fp32 H 1", "fp32 H 2"}
    assert report["fp32 H 1"]["curve"]["step"] == [0, 1, 2, 3, 4]
    assert report["fp32 H 2"]["curve"]["step"] == [0, 2, 4]
    for steps in (1, 2):
        found = report[f"fp32 H {steps}"]
        assert found["states_agree"] is True
        # A contribution in fp32 has the size of a gradient, less what zstd takes off.
        sent = found["bytes_per_parameter_and_round"]
        assert 2 < sent < 4.2
        assert found["times_less_than_gradients"] == pytest.approx(4 * steps / sent, abs=0.1)
    synchronous = report["synchronous"]
    assert "states_agree" not in synchronous and synchronous["above_synchronous"] == 0
    above = report["fp32 H 2"]["loss"] - synchronous["loss"]
    assert report["fp32 H 2"]["above_synchronous"] == pytest.approx(above, abs=2e-3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--variants fp16", "'fp16' is none of synchronous, alone, fp32"),
        ("--outer 0.7", "'' is no number from 0 to below 1"),
        ("--inner-steps 3", "--steps is 4, which is no whole number of rounds of 3 steps"),
    ],
)
def test_wrong_options_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    sentence: str,
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments.split())
    assert sentence in capsys.readouterr().err
