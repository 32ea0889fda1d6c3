"""The screen, at several sizes."""

from __future__ import annotations

import io
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from peers.demo.state import SwarmState
from peers.demo.view import PlainLines, Screen, compose, paste_lines, plot
from tests.demo.recorded import JOIN_LINE, fresh, identifier, say, trained
from tests.network.test_untrusted import HOSTILE, controls

SIZES = [(80, 24), (120, 40), (100, 30), (60, 16), (200, 60), (40, 12)]


def lines(state: SwarmState, width: int, height: int, now: float = 60.0) -> list[str]:
    """The screen as a terminal of that size shows it."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    console.print(Screen(state, lambda: now), height=height, end="")
    return out.getvalue().split("\n")


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("steps", [0, 1, 90, 250])
def test_it_fills_the_terminal_and_never_more(width: int, height: int, steps: int) -> None:
    shown = lines(trained(fresh(), steps), width, height)
    assert len(shown) <= height
    assert all(len(line) <= width for line in shown)
    if height >= 24:
        assert len(shown) == height, "a screen of changing height flickers"


@given(st.integers(1, 200), st.integers(1, 80), st.integers(0, 20), st.integers(1, 30))
def test_any_size_holds_it(width: int, height: int, steps: int, peers: int) -> None:
    state = trained(fresh(inference_peers=max(3, peers)), steps)
    assert len(compose(state, 60.0, width, height)) <= max(1, height)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_line_to_join_is_always_there_whole(width: int, height: int) -> None:
    shown = lines(trained(fresh(), 30), width, height)
    title = next(i for i, line in enumerate(shown) if "join from another terminal" in line)
    pasted = "\n".join(line.rstrip() for line in shown[title + 1 :])
    assert pasted.replace("\\\n", "") == JOIN_LINE  # what a shell makes of it (tested below)


def test_what_is_shown_at_80_by_24() -> None:
    state = trained(fresh(steps=100), 40)
    say(state, "validator", "membership.peer_admitted", 30.0, remote=identifier("guest"), roles=[])
    screen = "\n".join(lines(state, 80, 24, now=30.0))
    assert "step 40/100" in screen and "30 s left" in screen and "3,000 tokens/s" in screen
    for peer in state.peers.values():
        assert peer.name in screen
    assert "1× restarted" in screen
    assert "80 accepted · 1 refused: proof_exponents · 1 restart" in screen
    assert "41.2 against 90" in screen
    assert "inference-3 evicted: pooled mismatch" in screen


def test_more_peers_than_lines_are_counted() -> None:
    screen = "\n".join(lines(trained(fresh(inference_peers=40), 5), 80, 24))
    assert "more" in screen and "join from another terminal" in screen


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=300))
def test_a_cut_command_survives_pasting(word: str) -> None:
    command = "echo " + shlex.quote(word.replace("\\", "").replace("'", ""))
    cut = paste_lines(command, 40)
    assert all(len(line) <= 40 for line in cut)
    assert all(len(line) == 40 for line in cut[:-1])
    assert "".join(line[:-1] for line in cut[:-1]) + cut[-1] == command


def test_without_a_live_view_a_step_is_shown_every_ten_seconds() -> None:
    state = trained(fresh(steps=90), 90)  # half a second each
    usual, asked = (
        [line.split()[1] for line in each.lines() if line.startswith("step ")]
        for each in (PlainLines(state), PlainLines(state, 0.0))
    )
    assert usual == ["1/90", "21/90", "41/90", "61/90", "81/90", "90/90"]
    assert asked == [f"{step}/90" for step in range(1, 91)]


def dots(picture: list[str]) -> list[tuple[int, int]]:
    """(column, height above the bottom) of every dot."""
    bits = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
    found = []
    for row, line in enumerate(picture):
        for cell, character in enumerate(line):
            mask = ord(character) - 0x2800 if character != " " else 0
            found += [
                (2 * cell + dx, 4 * (len(picture) - row) - 1 - dy)
                for bit, (dx, dy) in enumerate(bits)
                if mask >> bit & 1
            ]
    return sorted(found)


def test_the_plot_shows_values_where_they_are() -> None:
    assert dots(plot([(0, 0.0)], 10, 5, 2)) == [(0, 0)]
    assert dots(plot([(9, 1.0)], 10, 5, 2)) == [(9, 7)]
    rising = dots(plot([(step, step / 9) for step in range(10)], 10, 5, 2))
    assert rising[0] == (0, 0) and rising[-1] == (9, 7)
    assert {column for column, _ in rising} == set(range(10)), "the curve has no gaps"


@given(HOSTILE)
def test_no_words_of_guests_steer_the_screen(words: str) -> None:
    state = trained(fresh(), 3)
    guest = identifier("guest")
    say(state, "validator", "membership.peer_admitted", 1.0, remote=guest, roles=[words])
    say(state, "trainer", "peer.status", 2.0, doing=words)
    say(
        state, "validator", "validator.verdict", 3.0, worker=guest, outcome="refused",
        failed=words, detail=words, figure=1.0, threshold=0.0, step=1, number=0,
    )  # fmt: skip
    say(state, "validator", "membership.peer_evicted", 4.0, remote=guest, reason=words)
    say(state, "validator", "membership.peer_evicted", 4.0, remote=words, reason=words)
    for line in compose(state, 60.0, 200, 60):
        assert controls(line.plain) == []
