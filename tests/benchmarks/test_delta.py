from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import delta
from peers.engines.demo import make_policy


def test_the_ratio_is_the_larger_one_after_one_step(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    make_policy(tmp_path, 0)
    arguments = ["--model", str(tmp_path), "--warm", "1"]
    monkeypatch.setattr(sys, "argv", ["delta", *arguments])
    delta.main()
    report = json.loads(capsys.readouterr().out)
    after = {rate: report[f"lr_{rate}"] for rate in ("1e-06", "3e-07")}
    assert report["bytes_ratio"] == max(each["after_1"]["bytes_ratio"] for each in after.values())
    assert 0 < report["bytes_ratio"] < 0.1
    assert report["checkpoint_bytes"] > 2 * 200_000  # in bf16
    for each in after.values():
        assert each["after_1"]["bytes_ratio"] < each["after_8"]["bytes_ratio"]
        for figures in each.values():
            assert 0 < figures["changed_share"] < 1
            assert figures["bytes_ratio"] < figures["full_zstd_ratio"] < 1
            assert figures["apply_gb_per_second"] > 0
            assert figures["encode_gb_per_second"] > 0
