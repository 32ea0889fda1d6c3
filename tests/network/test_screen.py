"""What a peer shows while it works, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from swarm.events import Event
from swarm.terminal import screen as screens
from swarm.terminal.screen import ROUTINE, Screen

BY = "12D3KooWLbo6V8Zoa5w1bRwXoWKyhqkrVrjbFQtYfQDP5NsWEqkA"


class Terminal(io.StringIO):
    """A terminal that scrolls: `rows` are what a person sees, the whole history included."""

    def isatty(self) -> bool:
        return True

    def rows(self) -> list[str]:
        rows = [""]
        for part in re.split(r"(\r(?:\x1b\[\d+A)?\x1b\[J|\n)", self.getvalue()):
            if part == "\n":
                rows.append("")
            elif part == "\r\x1b[J":
                rows[-1] = ""
            elif part.startswith("\r"):
                del rows[len(rows) - 1 - int(part[3:-4]) :]
                rows.append("")
            else:
                rows[-1] += part
        return rows


def status(**fields: Any) -> dict[str, Any]:
    return {
        "doing": "generating", "policy": 11, "step": 12, "tokens_per_second": 1250.0,
        "bytes_sent": 0, "bytes_received": 12_300_000, "reachability": "private", **fields,
    }  # fmt: skip


def receipt(number: int, outcome: str = "accepted") -> dict[str, Any]:
    return {
        "number": number, "step": 12, "by": BY, "outcome": outcome, "groups": 4, "completions": 32,
        "detail": "", "failed": "proof" if outcome != "accepted" else "", "figure": 1.0,
        "threshold": 0.5,
    }  # fmt: skip


def work(screen: Screen, submissions: int, seconds: float) -> None:
    """Submissions one after another, each with its receipt, evenly over so many seconds."""
    for number in range(submissions):
        now = 1e9 + number * seconds / submissions
        made = {"number": number, "step": 12, "tokens": 500, "seconds": 0.4}
        screen(Event("inference.submission_made", now, "me", made))
        screen(Event("inference.receipt", now, "me", receipt(number)))
        screen(Event("peer.status", now, "me", status()))


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_has_a_few_lines_that_are_drawn_anew(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screens, "_columns", lambda _stream: columns)
    terminal = Terminal()
    screen = Screen(terminal)
    work(screen, submissions=600, seconds=59)
    screen(Event("inference.receipt", 1e9 + 60, "me", receipt(600, "refused")))
    rows = terminal.rows()
    assert len(rows) < 16
    assert all(len(row) < columns for row in rows)
    words = " ".join(row.strip() for row in rows)
    assert "generating · step 12 · policy 11 · 1,250 tokens/s · 600 submissions made" in words
    assert "earned: 19,232 completions · 600 accepted · 1 refused" in words
    assert words.count("receipt from") == 2  # the first, and the refusal
    assert words.index("refused by check") < words.index("generating ·"), "news stand above"


def test_a_number_stands_beside_its_percent_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "_columns", lambda _stream: 80)
    terminal = Terminal()
    idle = [f"{share} % waiting for {'x' * share}" for share in range(20, 0, -1)]
    Screen(terminal)(Event("inference.device", 1e9, "me", {"busy": 0.5, "idle": idle}))
    assert not any(row.strip().startswith("%") for row in terminal.rows())


def test_elsewhere_a_minute_has_one_line() -> None:
    log = io.StringIO()
    work(Screen(log), submissions=3000, seconds=301)
    lines = log.getvalue().splitlines()
    assert "\x1b" not in log.getvalue()
    assert len(lines) == 2 + 5
    assert re.search(r" 2,9\d\d submissions made .* 2,9\d\d accepted$", lines[-1])


def test_slow_work_has_its_own_lines() -> None:
    log = io.StringIO()
    work(Screen(log), submissions=4, seconds=400)
    assert len(log.getvalue().splitlines()) == 8 and " · " not in log.getvalue()


def test_a_text_that_is_said_leaves_nothing_half_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "_columns", lambda _stream: 60)
    terminal = Terminal()
    screen = Screen(terminal)
    work(screen, submissions=60, seconds=30)
    before = terminal.rows()
    terminal.write("^C")  # the terminal's echo
    screen.say("leaving…")
    after = terminal.rows()
    news = before.index(next(row for row in before if row.startswith("generating")))
    assert after[: news + 1] == [*before[:news], "leaving…"]
    assert [row.startswith("generating") for row in after].count(True) == 1
    assert after[news + 1].startswith("generating") and len(after) == len(before) + 1


def test_routine_events_have_sentences() -> None:
    from swarm.sentences import _COMPOSED, SENTENCES

    assert ROUTINE.keys() <= SENTENCES.keys() | _COMPOSED.keys()
