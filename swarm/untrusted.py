"""Words that other peers wrote, made safe to show: nothing of theirs steers a terminal.

Whatever prints text that may come from a peer (a line of an event, a table, an error) sends it
through here first. Tables of rich get it as `rich.text.Text`, which knows no markup.
"""

from __future__ import annotations

import logging
from typing import Any

TEXT_SHOWN_MAX = 500
"""Characters of one text: as long as the longest reason that a message may carry."""

LINE_SHOWN_MAX = 10_000
"""Of a line that is ours, and may list addresses or runs."""


def printable(text: str, limit: int = TEXT_SHOWN_MAX) -> str:
    """`text` on one line of at most `limit` characters, without control characters.

    Escape sequences, line ends, marks that reverse the direction of writing and all else that has
    no shape of its own are written out (`\\x1b`, `\\u202e`).
    """
    shown = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def printable_lines(text: str) -> str:
    """Like `printable`, of our own words of several lines with a peer's in them."""
    return "\n".join(printable(line, LINE_SHOWN_MAX) for line in text.split("\n"))


class PrintableFormatter(logging.Formatter):
    """For log records of libraries and tracebacks: some quote what came over the wire."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def shown(value: Any) -> Any:
    """A field of an event or message with all its text `printable`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    if isinstance(value, dict):
        return {printable(str(name)): shown(item) for name, item in value.items()}
    return value
