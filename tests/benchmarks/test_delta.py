from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks import delta


def test_the_ratio_is_the_larger_one_after_one_step(capsys: Any, monkeypatch: Any) -> None:
    arguments = ["--hidden", "64", "--layers", "1", "--warm", "1"]
    monkeypatch.setattr(sys, "argv", ["delta", *arguments])
    delta.main()
    report = json.loads(capsys.readouterr().out)
    after = {rate: report[f"lr_{rate}"] for rate in ("1e-06", "3e-07")}
    assert report["bytes_ratio"] == max(each["after_1"]["bytes_ratio"] for each in after.values())
    assert 0 < report["bytes_ratio"] < 0.1
    assert report["checkpoint_bytes"] > 2 * 4096 * 64  # the embedding alone, in bf16
    for each in after.values():
        assert each["after_1"]["bytes_ratio"] < each["after_8"]["bytes_ratio"]
        for figures in each.values():
            assert 0 < figures["changed_share"] < 1
            assert figures["bytes_ratio"] < figures["full_zstd_ratio"] < 1
            assert figures["apply_gb_per_second"] > 0
            assert figures["encode_gb_per_second"] > 0
