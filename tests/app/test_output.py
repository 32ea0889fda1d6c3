"""JSON on standard output or in a file: every parser accepts it, and no other text is mixed in."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from benchmarks import study_plot
from swarm.errors import UserError
from swarm.terminal.output import STANDARD_OUTPUT, check_writable, write_json


def test_a_dash_is_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_writable("--json", STANDARD_OUTPUT)
    write_json("--json", {"speed": math.inf, "all": [math.nan, (1.5,)]}, STANDARD_OUTPUT)
    assert json.loads(capsys.readouterr().out) == {"speed": None, "all": [None, [1.5]]}
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--json .* cannot be written \(Is a directory\)"):
        write_json("--json", {}, tmp_path)


@pytest.mark.parametrize(
    ("report", "picture", "sentence"),
    [
        (None, "x.png", "cannot be read (No such file or directory)"),
        ("", "x.png", "is not JSON"),
        ("[]", "x.png", "holds no curve"),
        ("{}", "x.gif", "must end with .png or .svg or .pdf"),
    ],
)
def test_a_study_that_cannot_be_drawn_is_a_sentence(
    report: str | None,
    picture: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "report.json"
    if report is not None:
        path.write_text(report)
    monkeypatch.setattr(sys, "argv", ["study_plot", str(path), str(tmp_path / picture)])
    with pytest.raises(SystemExit) as ended:
        study_plot.main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
