"""Signs raise an alarm, quiet or a proof clears it, by a peer's events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarm.events import Event
from swarm.look.alarms.raising import CATALOGUE, RECEIPTS, Board, FromEvents
from swarm.settings import AlarmSettings


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Watched:
    """A board with a clock, and the changes that it tells."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.told: list[tuple[str, str]] = []
        self.board = Board(self.clock, lambda name, _, state: self.told.append((name, state)))

    @property
    def names(self) -> list[str]:
        return list(self.board.raised)


def test_an_alarm_needs_its_signs_and_its_quiet_time() -> None:
    watched = Watched()
    kind = CATALOGUE["trusted_silent"]
    for _ in range(kind.signs):
        assert watched.names == []
        watched.board.sign("trusted_silent", "silent")
        watched.clock.seconds += 10
    assert watched.names == ["trusted_silent"]
    for _ in range(100):  # signs that go on neither repeat it nor clear it
        watched.clock.seconds += kind.quiet_seconds - 11
        watched.board.settle()
        watched.board.sign("trusted_silent", "still \x1b[31m silent")
    assert watched.told == [("trusted_silent", "raised")]
    assert watched.board.raised == {"trusted_silent": "still \\x1b[31m silent"}
    watched.clock.seconds += kind.quiet_seconds
    watched.board.settle()
    assert watched.told[1:] == [("trusted_silent", "cleared")]
    assert watched.names == []


def test_signs_that_are_far_apart_raise_nothing() -> None:
    watched = Watched()
    for _ in range(20):
        watched.board.sign("children_die", "died")
        watched.clock.seconds += CATALOGUE["children_die"].within_seconds / 2 + 1
    assert watched.told == []


class Peer(Watched):
    def __init__(self, home: Path, **settings: Any) -> None:
        super().__init__()
        self.signs = FromEvents(self.board, AlarmSettings(**settings), home)

    def emit(self, name: str, **fields: Any) -> None:
        self.signs(Event(name, 0.0, "me", fields))


def test_a_peer_is_starved_after_a_while_until_it_has_work(tmp_path: Path) -> None:
    peer = Peer(tmp_path, starved_seconds=100)
    starved = {"reason": "no step order has come", "waiting_for": [], "not_connected": []}
    peer.emit("inference.starved", seconds=99.0, **starved)
    assert peer.names == []
    peer.emit("inference.starved", seconds=130.0, **starved)
    assert "nothing to do for 130 s: no step order has come" in peer.board.raised["starved"]
    peer.emit("inference.submission_made")
    assert peer.told == [("starved", "raised"), ("starved", "cleared")]


def test_refusals_count_once_there_are_enough(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    for _ in range(RECEIPTS - 1):
        peer.emit("inference.receipt", outcome="refused")
    assert peer.names == []
    peer.emit("inference.receipt", outcome="refused")
    assert peer.names == ["refusals_rise"]


def test_a_trusted_peer_that_starts_again_rings_nobody(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    for remote in ("trainer", "a", "b", "c"):
        silent = {"remote": remote, "reason": "away", "seconds": 0.0}
        peer.emit("membership.trusted_silent", **silent)
    assert peer.names == []
    for seconds in (60.0, 120.0, 180.0):
        peer.clock.seconds += 60
        assert peer.names == []
        silent = {"remote": "trainer", "reason": "away", "seconds": seconds}
        peer.emit("membership.trusted_silent", **silent)
    assert peer.names == ["trusted_silent"]


def test_disk_and_steps_are_looked_at(tmp_path: Path) -> None:
    peer = Peer(tmp_path, disk_free_share=1.0, no_step_seconds=60)
    peer.signs.look()
    assert peer.names == ["disk_low"]
    peer.emit("trainer.step_opened")
    peer.clock.seconds += 61
    peer.signs.look()
    assert peer.names == ["disk_low", "no_step"]
    peer.emit("trainer.step_trained")
    assert peer.names == ["disk_low"]


@pytest.mark.parametrize("name", ["inference.device", "inference.receipt", "x.starved"])
def test_another_programs_event_of_a_name_breaks_nothing(name: str, tmp_path: Path) -> None:
    Peer(tmp_path).emit(name)


def test_a_disk_that_cannot_be_asked_is_an_alarm_and_no_end(tmp_path: Path) -> None:
    peer = Peer(tmp_path / "taken away")
    peer.signs.look()
    said = peer.board.raised["disk_low"]
    assert said.endswith("taken away cannot be asked (No such file or directory)")
