"""What `swarm` alone and `swarm -h` show."""

from __future__ import annotations

import re
from importlib.metadata import entry_points

import pytest
from typer.testing import CliRunner

from swarm.commands.main import FIRST_LINES, GROUP, OTHERS, PANELS, app


def ours() -> set[str]:
    found = entry_points(group=GROUP)
    return {each.name for each in found if each.value.startswith(("swarm.", "peers."))}


def test_every_command_stands_under_one_head() -> None:
    listed = " ".join(PANELS.values()).split()
    assert len(listed) == len(set(listed))
    assert set(listed) == {name for name in ours() if "." not in name}
    shown = CliRunner().invoke(app, ["-h"])
    assert shown.exit_code == 0
    assert OTHERS not in shown.output
    places = [shown.output.index(head) for head in PANELS]
    assert places == sorted(places)


def test_swarm_alone_shows_lines_that_can_be_typed() -> None:
    shown = CliRunner().invoke(app, [])
    assert (shown.exit_code, shown.output) == (0, FIRST_LINES)
    lines = re.findall(r"^.{17}swarm ((?:[a-z-]+ )+)", FIRST_LINES, re.M)
    assert len(lines) > 12
    for line in lines:
        words = [word for word in line.split() if not word.startswith("-")]
        for depth in range(1, len(words) + 1):
            help_of = CliRunner().invoke(app, [*words[:depth], "-h"])
            assert help_of.exit_code == 0, help_of.output


@pytest.mark.parametrize(
    ("typed", "word", "offered"),
    [("swarm sta", 1, "status"), ("swarm run ", 2, "create"), ("swarm eval --gre", 2, "--greedy")],
)
def test_the_shell_completes(typed: str, word: int, offered: str) -> None:
    variables = {"COMP_WORDS": typed, "COMP_CWORD": str(word), "_SWARM_COMPLETE": "complete_bash"}
    shown = CliRunner().invoke(app, env=variables, prog_name="swarm")
    assert offered in shown.output.split()
