"""What `swarm` alone and `swarm -h` show."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, get_origin

import pytest
import typer
from typer.testing import CliRunner

import swarm
from swarm.commands.main import FIRST_LINES, GROUP, HEADS, OTHERS, Deferred, _docstring_in, app


def ours() -> set[str]:
    found = entry_points(group=GROUP)
    return {each.name for each in found if each.value.startswith(("swarm.", "peers."))}


def test_every_command_stands_under_one_head() -> None:
    listed = " ".join(HEADS.values()).split()
    assert len(listed) == len(set(listed))
    assert set(listed) == {name for name in ours() if "." not in name}
    shown = CliRunner().invoke(app, ["-h"])
    assert shown.exit_code == 0
    assert OTHERS not in shown.output
    places = [shown.output.index(head) for head in HEADS]
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


def _of_words() -> list[Path]:
    """The modules whose commands take their words from a file beside them."""
    rooms = (Path(swarm.__file__).parents[1] / each for each in ("swarm", "peers", "simnet"))
    found = (path for room in rooms for path in room.rglob("*.py"))
    return [path for path in found if "\n@explained(" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", _of_words(), ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_words_are_an_options_and_every_option_has_some(path: Path) -> None:
    module = importlib.import_module(
        ".".join(path.relative_to(Path(swarm.__file__).parents[1]).with_suffix("").parts)
    )
    tables = tomllib.loads(path.with_suffix(".toml").read_text(encoding="utf-8"))
    shared = tables.pop("all", {})
    commands = [name for name in _explained(path) if name in tables or shared]
    assert tables.keys() <= set(commands), "a table of words is no command's"
    named: set[str] = set()
    for command in commands:
        parameters = inspect.signature(getattr(module, command), eval_str=True).parameters
        named |= parameters.keys()
        assert tables.get(command, {}).keys() <= parameters.keys(), command
        for name, parameter in parameters.items():
            if parameter.annotation is not typer.Context:
                assert get_origin(parameter.annotation) is Annotated, f"{command} {name}"
    assert shared.keys() <= named


def _explained(path: Path) -> list[str]:
    """The functions of a module that are `explained`."""
    return [
        each.name
        for each in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(each, ast.FunctionDef)
        and any(ast.unparse(mark).startswith("explained(") for mark in each.decorator_list)
    ]


def _options(command: Any, path: str = "swarm") -> Iterator[tuple[str, str, str]]:
    """(command, option, kind of its value) of every command and option."""
    command = command.loaded() if isinstance(command, Deferred) else command
    for each in command.params:
        for name in each.opts:
            if name.startswith("--"):
                kind = each.type_descriptor.annotation if each.type_descriptor else str
                yield path, name, "count" if kind in (int, float) else kind.__name__
    for name, inner in getattr(command, "commands", {}).items():
        yield from _options(inner, f"{path} {name}")


def test_one_word_stands_for_one_thing_in_every_command() -> None:
    kinds: dict[str, set[str]] = {}
    for _, option, kind in _options(typer.main.get_command(app)):
        same = {"list": "text", "str": "text", "Path": "text"}.get(kind, kind)
        kinds.setdefault(option, set()).add(same)
    assert [option for option, found in kinds.items() if len(found) > 1] == []
    assert len(kinds) > 100
    others = "--policy --teacher --checkpoint --tasks --ledger --to --last --folder --token-file"
    assert not kinds.keys() & set(others.split())
    assert kinds["--json"] == {"bool"}


def test_docstrings_are_read_at_once_as_a_parser_reads_them() -> None:
    found = 0
    for entry in entry_points(group=GROUP):
        if entry.name in ours():
            path = Path(swarm.__file__).parents[1] / f"{entry.module.replace('.', '/')}.py"
            source = path.read_text(encoding="utf-8")
            for node in ast.parse(source).body:
                if isinstance(node, ast.FunctionDef):
                    read = _docstring_in(source, node.name)
                    assert read in (None, ast.get_docstring(node)), node.name
                    found += read is not None and node.name == entry.attr
    assert found >= 20
