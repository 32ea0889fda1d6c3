"""The curves of several seeds in one report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recipe_curves


def written(path: Path, seed: int, *, steps: int = 20, reward: float = 0.5) -> str:
    accuracies = dict.fromkeys(recipe_curves.FIGURES, reward)
    run = {"seed": seed, "reward_by_tenth": [0.0, reward], "cpu_seconds": 1.0, **accuracies}
    path.write_text(json.dumps({"environment": "tools", "steps": steps, "runs": [run]}))
    return str(path)


def test_seeds_become_a_median_and_a_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = (0.2, 0.9, 0.7)
    paths = [written(tmp_path / f"{n}.json", n, reward=reward) for n, reward in enumerate(rewards)]
    monkeypatch.setattr(sys, "argv", ["recipe_curves", *paths])
    recipe_curves.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["tools"]
    assert found["seeds"] == [0, 1, 2]
    assert found["sampled_accuracy_after"] == {"median": 0.7, "least": 0.2, "most": 0.9}
    assert found["curve"] == {
        "step": [5.0, 15.0],
        "mean": [0.0, 0.6],
        "low": [0.0, 0.2],
        "high": [0.0, 0.9],
    }


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("[]", "is no report (Expected `object`, got `array`); give what benchmarks.recipe"),
        (40, "has 40 steps, an earlier report of tools has 20; give reports of equally many"),
    ],
)
def test_reports_that_do_not_fit_are_a_sentence(
    content: str | int | None,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = written(tmp_path / "0.json", 0), tmp_path / "1.json"
    if isinstance(content, int):
        written(second, 1, steps=content)
    elif content is not None:
        second.write_text(content)
    monkeypatch.setattr(sys, "argv", ["recipe_curves", first, str(second)])
    with pytest.raises(SystemExit) as ended:
        recipe_curves.main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
