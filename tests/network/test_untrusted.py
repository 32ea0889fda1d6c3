"""Words of strangers are shown, and steer nothing."""

from __future__ import annotations

import io
import json
import math
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from swarm.events import Event, JsonLines, Lines
from swarm.terminal.untrusted import printable, printable_lines

HOSTILE = st.text(max_size=700) | st.text(st.sampled_from("\x1b\x07\x9b\r\n\t\u202e\u2066[]ab🙂"))
"""Any text, surrogates too, and much of what steers a terminal."""


def controls(text: str) -> list[str]:
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


@given(text=HOSTILE, limit=st.integers(1, 600))
def test_no_text_steers_a_terminal_or_is_longer_than_it_may_be(text: str, limit: int) -> None:
    told = printable(text, limit)
    assert controls(told) == []
    assert len(told) <= limit
    assert set(controls(printable_lines(text))) <= {"\n"}


def test_plain_words_are_left_alone() -> None:
    assert (
        printable("generating step 3 of 9: 6 × 7 → „ö“ 数")
        == "generating step 3 of 9: 6 × 7 → „ö“ 数"
    )
    assert printable("\x1b[31mred\nand\u202e more", 80) == r"\x1b[31mred\nand\u202e more"
    assert printable("a" * 20, 8) == "aaaaaaa…"


@given(text=HOSTILE)
def test_every_event_is_one_line(text: str) -> None:
    for name, fields in (
        ("membership.peer_admitted", {"remote": text, "roles": [text, text]}),
        ("membership.refused", {"remote": text, "reason": text}),
        ("somebodys.event", {"text": text, "list": [text], "table": {text: text}}),
    ):
        stream = io.StringIO()
        Lines(stream, verbose=True)(Event(name, 0.0, "me", dict(fields)))
        line = stream.getvalue()
        assert controls(line) == ["\n"] and line.endswith("\n"), name


def test_json_holds_no_infinity() -> None:
    stream = io.StringIO()
    JsonLines(stream)(Event("a.b", 0.0, "me", {"speed": math.inf, "list": [math.nan, 1.5]}))
    told = json.loads(stream.getvalue(), parse_constant=lambda word: f"{word} is no JSON")
    assert (told["speed"], told["list"]) == (None, [None, 1.5])
