r"""Blocks of code in Markdown as models write it, and which of them may be a program.

A model writes more than CommonMark allows: a fence behind text or a list's number, code that ends
on the line of its closing fence, a whole block on one line, a tag on a line of its own. All of it
takes time in proportion to the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["python", "untagged", "other"]

CANDIDATES_MAX = 32
"""Blocks of one text that may be its program: the last ones."""
DEPTH_MAX = 4
"""Blocks of Markdown within each other."""

_PYTHON = re.compile(
    r"[\s{.]*(?:language-|lang(?:uage)?\s*[=:]\s*)?[\"']?"
    r"(?:[ic]?python|pypy|py)[\d.]*(?![a-z]|-?(?:repl|console|traceback))"
    r"|[\w./-]{1,100}\.py\b"
)
"""A tag of Python: `python`, `Python3`, `py`, `pypy3`, `{.python .numberLines}`, `main.py`."""
_MARKDOWN = re.compile(r"[\s{.]*(?:markdown|md)\b")
_QUOTE = re.compile(r"^[ \t]*>[ \t]?", re.MULTILINE)
_END_OF_LINE = re.compile(r"\r\n?")


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class _Fence:
    """A line that may open a block."""

    mark: str
    info: str
    is_quoted: bool

    def is_closed_by(self, line: str) -> bool:
        """Whether a line ends the block: the fence, perhaps behind the last line of code."""
        end = line.rstrip()
        run = len(end) - len(end.rstrip(self.mark[0]))
        alone = run == len(end.lstrip(" \t>"))
        return run >= len(self.mark) and (alone or self.mark[0] == "`")


def candidates(text: str) -> list[str]:
    """What may be the program in a completion, the best first.

    The whole text if it is Python; else the last block that is tagged as Python, or one before it;
    else the same of blocks without a tag; else of blocks with another tag. A block that is never
    closed is none.
    """
    text = _END_OF_LINE.sub("\n", text.removeprefix("\ufeff"))
    found = blocks(text)[-CANDIDATES_MAX:]
    kinds: tuple[Kind, ...] = ("python", "untagged", "other")
    ordered = [b.text for kind in kinds for b in reversed(found) if b.kind == kind]
    return [each for each in (_dedented(text), *ordered) if each.strip()]


def is_python(tag: str) -> bool:
    """Whether a block's tag, or a record's word for a language, is Python's."""
    return _PYTHON.match(tag.strip().lower()) is not None


def blocks(text: str, depth: int = 0) -> list[Block]:
    """The closed blocks of a text with the line ends of Unix, in order."""
    found: list[Block] = []
    fence: _Fence | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        if fence is not None and fence.is_closed_by(line):
            last = line.rstrip().rstrip(fence.mark[0])
            found += _closed(fence, [*lines, last] if last.strip(" \t>") else lines, depth)
            fence = None
            continue
        opening = _opening(line)
        # A tagged fence within a block: the block before it was never closed.
        if opening is not None and (
            fence is None or (opening.info and len(opening.mark) >= len(fence.mark))
        ):
            fence, lines = opening, []
        elif fence is not None:
            lines.append(line)
        elif "```" in line:
            found += _inline(line)
    return found


def _opening(line: str) -> _Fence | None:
    start = line.lstrip(" \t>")
    quoted = ">" in line[: len(line) - len(start)]
    tildes = len(start) - len(start.lstrip("~"))
    if tildes >= 3:
        return _Fence("~" * tildes, start[tildes:].strip(), quoted)
    head, tick, info = line.rpartition("`")
    before = (head + tick).rstrip("`")
    ticks = len(head + tick) - len(before)
    if ticks < 3 or "```" in before:
        return None
    return _Fence("`" * ticks, info.strip(), quoted)


def _closed(fence: _Fence, lines: list[str], depth: int) -> list[Block]:
    text = "".join(f"{line}\n" for line in lines)
    if fence.is_quoted:
        text = _QUOTE.sub("", text)
    info = fence.info.lower()
    if _MARKDOWN.match(info) and depth < DEPTH_MAX:
        return blocks(text, depth + 1)
    first, _, rest = text.partition("\n")
    if not info and first.strip() and _PYTHON.fullmatch(first.strip().lower()):
        return [Block("python", _dedented(rest))]
    kind: Kind = "python" if is_python(info) else "other" if info else "untagged"
    return [Block(kind, _dedented(text))]


def _inline(line: str) -> list[Block]:
    """The last block that begins and ends on one line."""
    content = line.rstrip().rstrip("`").rpartition("```")[2].strip()
    tag, _, rest = content.partition(" ")
    if _PYTHON.fullmatch(tag.lower()):
        return [Block("python", rest.strip())]
    return [Block("untagged", content)]


def _dedented(text: str) -> str:
    """The text without the indentation of its first line, where lines have it."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    indentation = first[: len(first) - len(first.lstrip(" \t"))]
    if not indentation:
        return text
    return "\n".join(line.removeprefix(indentation) for line in text.split("\n"))
