"""JSON on standard output or in a file: every parser accepts it, and no other text is mixed in."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from swarm.errors import UserError
from swarm.terminal.output import STANDARD_OUTPUT, check_writable, print_lines, write_json


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


def test_lines_are_cut_between_words_and_ids_stay_whole() -> None:
    identifier = "12D3KooWLbo6V8Zoa5w1bRwXoWKyhqkrVrjbFQtYfQDP5NsWEqkA"
    for terminal in (True, False):
        told = io.StringIO()
        console = Console(file=told, width=40, force_terminal=terminal, color_system=None)
        print_lines([Text(f"{identifier} live"), Text("step 12 of 250 · " * 4)], console)
        lines = told.getvalue().splitlines()
        assert lines[0] == f"{identifier} live"
        assert (len(lines) == 2) != terminal
        assert not terminal or max(map(len, lines[1:])) <= 40
