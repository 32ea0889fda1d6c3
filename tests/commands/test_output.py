"""JSON on standard output or in a file: every parser accepts it, and no other text is mixed in."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

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
