"""What each room opens: its files in its `__init__.py`, their names in docs/rooms.md.

    python -m tests.docs.room_names

writes both anew. A name that appears there for the first time has become public: look at the
change before you commit it. `tests/docs/test_rooms.py` refuses imports of other names.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("swarm", "peers", "simnet")
READERS = (*PACKAGES, "benchmarks")
"""Whose imports count. Tests may look into a room."""

HEAD = "For other rooms, by the names in docs/rooms.md:"
PAGE = REPOSITORY / "docs" / "rooms.md"
_FILE = re.compile(r"`([\w.]+)`")
_ROOM = re.compile(r"^## ([\w.]+)\n((?:(?!^## ).*\n?)*)", re.MULTILINE)
_ROW = re.compile(r"^\| `([\w.]+)` \| (.+) \|$", re.MULTILINE)

Names = dict[str, set[str]]
"""Names by the file that has them, a dotted path below the room; `__init__` is the room itself."""


@cache
def rooms() -> dict[str, Path]:
    """The `__init__.py` of each room, by the room's dotted name."""
    found = (path for package in PACKAGES for path in (REPOSITORY / package).glob("*/__init__.py"))
    return {f"{path.parent.parent.name}.{path.parent.name}": path for path in sorted(found)}


def used() -> dict[str, Names]:
    """The names that each room's files are asked for from outside it."""
    found: dict[str, Names] = {room: defaultdict(set) for room in rooms()}
    for package in READERS:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            inside = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts[:2])
            for module, name in _imports(path):
                room = ".".join(module.split(".")[:2])
                if room in found and room != inside:
                    file = module.removeprefix(room).removeprefix(".")
                    if not file and (rooms()[room].parent / f"{name}.py").exists():
                        file, name = name, "*"  # the module itself
                    found[room][file or "__init__"].add(name)
    return found


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                yield node.module, each.name


def listed() -> dict[str, Names]:
    """The names that the page lists, by the room's dotted name."""
    return {
        room: {file: set(names.replace("`", "").split(", ")) for file, names in _ROW.findall(rows)}
        for room, rows in _ROOM.findall(PAGE.read_text(encoding="utf-8"))
    }


def listed_files(room: str) -> set[str]:
    """The files that a room's docstring lists."""
    text = rooms()[room].read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return set(_FILE.findall(docstring.partition(HEAD)[2]))


def page() -> str:
    """The page of all names, made from the imports."""
    parts = [
        "# Rooms\n\nThe names that other rooms use, by the room and its file (`__init__` is the "
        "room itself, `*` the whole file). `python -m tests.docs.room_names` writes this page from "
        "the imports, and a test refuses an import of any other name "
        "([why](decisions/0070-names-of-rooms-on-a-page.md)).\n"
    ]
    for room, names in used().items():
        if names:
            rows = [
                f"| `{file}` | {', '.join(f'`{name}`' for name in sorted(found))} |\n"
                for file, found in sorted(names.items())
            ]
            parts.append(f"\n## {room}\n\n| File | Names |\n|---|---|\n{''.join(rows)}")
    return "".join(parts)


def written(room: str, names: Names) -> str:
    """A room's `__init__.py` with its list of files, a paragraph, at the end of its docstring."""
    text = rooms()[room].read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text), clean=False) or ""
    kept = docstring.split("For other rooms")[0].rstrip()
    items = ", ".join(f"`{file}`" for file in sorted(names))
    wrapped = textwrap.fill(f"{HEAD} {items}", width=100, break_on_hyphens=False)
    new = f"{kept}\n\n{wrapped}\n" if items else kept
    return text.replace(f'"""{docstring}"""', f'"""{new}"""', 1)


def main() -> None:
    for room, names in used().items():
        rooms()[room].write_text(written(room, names), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
