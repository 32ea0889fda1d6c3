"""Text from other peers, made safe to print: it cannot control the terminal.

All printed text that may come from a peer (an event's line, a table, an error) passes through here
first. Tables of rich get it as `rich.text.Text`, which does not parse markup."""

import logging
from typing import Any

TEXT_SHOWN_MAX = 500
"""Most characters of one text: the length of the longest reason that a message may carry."""

LINE_SHOWN_MAX = 10_000
"""Most characters of a line that this peer composed, which may list addresses or runs."""


def printable(text: str, limit: int = TEXT_SHOWN_MAX) -> str:
    """Return `text` as one line of at most `limit` characters, without control characters.

    Characters that are not printable are written as escapes (`\\x1b`, `\\u202e`): escape sequences,
    line ends, marks that reverse the direction of writing, and others."""
    shown = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def printable_lines(text: str) -> str:
    """Apply `printable` to each line of a text of this peer's own that contains peers' text."""
    return "\n".join(printable(line, LINE_SHOWN_MAX) for line in text.split("\n"))


class PrintableFormatter(logging.Formatter):
    """Formatter for libraries' log records and tracebacks, which may quote text from the wire."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def shown(value: Any) -> Any:
    """Apply `printable` to all text in a field of an event or message."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    if isinstance(value, dict):
        return {printable(str(name)): shown(item) for name, item in value.items()}
    return value
