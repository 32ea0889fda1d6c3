from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks import proofs


def test_every_figure_has_its_spread_and_the_ratio_needs_the_package(
    capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(proofs, "package", lambda: None)
    arguments = "--tokens 64 --widths 64 --repeats 2"
    monkeypatch.setattr(sys, "argv", ["proofs", *arguments.split()])
    proofs.main()
    figures = json.loads(capsys.readouterr().out)["proofs"]["64"]
    assert figures["build_ratio"] is None
    assert figures["build_seconds_least"] <= figures["build_seconds"]
