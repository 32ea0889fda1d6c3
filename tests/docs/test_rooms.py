"""No package names in a string a module that it may not import. `make lint` checks the imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.room_names import REPOSITORY, listed, listed_files, used

MODULE = re.compile(r"\b(?:peers|simnet|swarm)(?:\.[A-Za-z_]\w*)+")

SWARM = set((REPOSITORY / "swarm").rglob("*.py"))
PEERS = set((REPOSITORY / "peers").rglob("*.py"))


def named_modules(source: str) -> Iterator[str]:
    """Collect the modules that a program's strings name, docstrings left out."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from MODULE.findall(node.value)


def offences(paths: set[Path], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(REPOSITORY)} names {name}"
        for path in sorted(paths)
        for name in named_modules(path.read_text(encoding="utf-8"))
        if name.startswith(forbidden) and not name.endswith(".js")  # a file of the dashboard
    ]


def test_swarm_names_no_role_and_no_simulator() -> None:
    assert offences(SWARM, ("peers.", "simnet.")) == []


def test_roles_do_not_name_the_simulator() -> None:
    assert offences(PEERS, ("simnet.",)) == []


def test_named_modules_finds_what_runs_a_module_by_name() -> None:
    source = (
        'run("peers.trainer.service:open_service")\nimport_module("simnet.plot")\nsay("peers met")'
    )
    assert list(named_modules(source)) == ["peers.trainer.service", "simnet.plot"]


def test_a_room_is_entered_by_the_names_that_it_lists() -> None:
    """`python -m tests.docs.room_names` lists them anew; look at what has become public."""
    page = listed()
    for room, names in used().items():
        public = page.get(room, {})
        for file, asked in names.items():
            deeper = asked - public.get(file, set())
            assert not deeper, f"{room}.{file} is asked for {sorted(deeper)}, which {room} hides"
        stale = {file: found - names.get(file, set()) for file, found in public.items()}
        assert not any(stale.values()), f"{room} lists what no other room uses: {stale}"
        assert listed_files(room) == set(names), f"{room} lists other files than docs/rooms.md"
