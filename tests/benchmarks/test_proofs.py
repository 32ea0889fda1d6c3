from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks import proofs


def test_every_figure_has_its_spread_and_the_ratio_needs_the_package(
    capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(proofs, "package", lambda: None)
    arguments = "--tokens 64 --widths 64 --hidden 64 --layers 1 --completions 2 --new-tokens 8"
    monkeypatch.setattr(sys, "argv", ["proofs", *arguments.split(), "--repeats", "2"])
    proofs.main()
    report = json.loads(capsys.readouterr().out)
    assert report["proofs"]["64"]["build_ratio"] is None
    figures = report["verification"]
    assert 0 < figures["share_at_1_least"] <= figures["share_at_1"] <= figures["share_at_1_most"]
    assert figures["share_at_default"] < figures["share_at_1"]
    assert 2 <= figures["tokens"] <= 16
