from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from benchmarks import sandbox
from peers.sandbox import probe


@pytest.mark.slow
@pytest.mark.skipif(not probe().works, reason=f"no sandbox here: {probe().reasons}")
def test_each_means_is_measured(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["sandbox", "--programs", "1", "--rounds", "1"])
    sandbox.main()
    report = json.loads(capsys.readouterr().out)
    assert list(report["means"]) == list(probe().works)
    for figures in report["means"].values():
        assert figures["start_ms"] > 0
        assert figures["programs_per_second"] > figures["graded_per_second"] * 0.2 > 0
