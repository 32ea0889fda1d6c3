"""Signs raise an alarm, quiet or a proof clears it: by a peer's events, and by what a run shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarm.events import Event
from swarm.look.alarms.board import Alarm, Board
from swarm.look.alarms.catalogue import CATALOGUE
from swarm.look.alarms.from_events import RECEIPTS, SIGNS, FromEvents
from swarm.look.alarms.from_run import FromRun
from swarm.look.dashboard.building import Builder
from swarm.look.dashboard.history import History
from swarm.look.dashboard.snapshot import Head, Snapshot, StepRow
from swarm.settings import AlarmSettings
from tests.dashboard.harness import order, present, status_with
from tests.ledger.harness import TRAINER


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Watched:
    """A board with a clock, and the changes that it tells."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.board = Board(self.clock, lambda: 1e9 + self.clock.seconds)
        self.told: list[tuple[str, str]] = []
        self.board.changed.append(lambda alarm, state: self.told.append((alarm.name, state)))

    @property
    def names(self) -> list[str]:
        return [alarm.name for alarm in self.board.active]


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
    (alarm,) = watched.board.active
    assert alarm.since == 1e9 + 20 and alarm.sentence == "still \\x1b[31m silent"
    watched.clock.seconds += kind.quiet_seconds
    watched.board.settle()
    assert watched.told[1:] == [("trusted_silent", "cleared")]
    assert watched.board.active == []


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


def test_each_sign_of_a_peer_is_in_the_catalogue(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    for event, name in SIGNS.items():
        for _ in range(CATALOGUE[name].signs):
            peer.emit(event)
        assert name in peer.names, event


def test_a_peer_is_starved_after_a_while_until_it_has_work(tmp_path: Path) -> None:
    peer = Peer(tmp_path, starved_seconds=100)
    starved = {"reason": "no step order has come", "waiting_for": [], "not_connected": []}
    peer.emit("inference.starved", seconds=99.0, **starved)
    assert peer.names == []
    peer.emit("inference.starved", seconds=130.0, **starved)
    (alarm,) = peer.board.active
    assert "nothing to do for 130 s: no step order has come" in alarm.sentence
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


# --- a run from outside --------------------------------------------------------------------------


def step(reward: float, refused: int = 0) -> StepRow:
    return StepRow(accepted=8, refused=refused, quarantined=0, reward=reward, length=1.0)


def test_a_run_that_stands_still_rings_until_the_next_step() -> None:
    watched = Watched()
    run = FromRun(watched.board, AlarmSettings(no_step_seconds=100))
    for now in (0.0, 60.0, 120.0):
        head = Head("run", step=3, trainer="It waits for rollouts.", chain=["no worker"])
        run.read(Snapshot(head), now)
    (alarm,) = watched.board.active
    assert alarm.sentence == "step 3 has been open for 2 min: It waits for rollouts."
    assert alarm.facts == ["no worker"]
    run.read(Snapshot(Head("run", step=4)), 130.0)
    assert watched.told == [("no_step", "raised"), ("no_step", "cleared")]


def read_for(watched: Watched, seconds: int, lag: int) -> None:
    """Look at a run with a policy a second, whose only worker is so many policies behind."""
    run = FromRun(watched.board, AlarmSettings())
    for now in range(0, seconds, 2):
        entries = [present("w", "inference", policy=max(0, now - lag))]
        status = status_with(entries, order(now + 1))
        run.read(Builder().snapshot(status, History(), []), float(now))
        watched.clock.seconds += 2


def test_a_worker_of_a_quick_run_is_behind_only_if_its_heartbeat_is_not_to_blame() -> None:
    quick, late = Watched(), Watched()
    read_for(quick, 600, lag=15)
    assert quick.told == []
    read_for(late, 600, lag=40)
    assert late.names == ["broadcast_stalled"]


def test_what_lasts_is_over_when_it_ends() -> None:
    watched = Watched()
    run = FromRun(watched.board, AlarmSettings())
    away = [present(TRAINER.peer_id, "trainer", standing="gone", age_seconds=90.0)]
    for now in range(0, 240, 2):
        run.read(Builder().snapshot(status_with(away, order()), History(), []), float(now))
        watched.clock.seconds += 2
    assert watched.names == ["trusted_silent"]
    back = [present(TRAINER.peer_id, "trainer")]
    run.read(Builder().snapshot(status_with(back, order()), History(), []), 240.0)
    assert watched.names == []


def test_a_falling_reward_and_refusals_ring() -> None:
    watched = Watched()
    run = FromRun(watched.board, AlarmSettings())
    steps = {n: step(0.8) for n in range(10)}
    run.read(Snapshot(Head("run"), steps=steps), 0.0)
    assert watched.names == []
    steps |= {n: step(0.1, refused=4) for n in range(10, 20)}
    run.read(Snapshot(Head("run"), steps=steps), 1.0)
    assert watched.names == ["reward_falls", "refusals_rise"]
    steps |= {n: step(0.9) for n in range(20, 30)}
    watched.clock.seconds = CATALOGUE["reward_falls"].quiet_seconds
    watched.board.sign("refusals_rise", "they still do")
    run.read(Snapshot(Head("run"), steps=steps), watched.clock.seconds)
    assert watched.names == ["refusals_rise"], "quiet clears it"


def test_a_reward_that_swings_about_its_limit_rings_once() -> None:
    watched = Watched()
    run = FromRun(watched.board, AlarmSettings())
    steps = {n: step(1.0) for n in range(10)}
    for number in range(10, 410):
        steps[number] = step(0.49 if number // 10 % 2 else 0.52)
        watched.clock.seconds += 5
        run.read(Snapshot(Head("run"), steps=steps), watched.clock.seconds)
    assert watched.told == [("reward_falls", "raised")]


def test_what_is_wrong_with_the_run_rings() -> None:
    watched = Watched()
    run = FromRun(watched.board, AlarmSettings())
    status = status_with([present("evil", "inference")], order())
    status.forks["x"] = "y"
    status.contradicting = 2
    found = Builder().snapshot(status, History(), ["a log says Validators disagree, is forked"])
    run.read(found, 0.0)
    assert sorted(watched.names) == ["log_forked", "validators_disagree"]
    assert found.head.signs["log_forked"] == "the log of x is forked: y"
    assert len(found.head.problems) == 1


def test_no_peers_words_ring() -> None:
    watched = Watched()
    words = "the log of x is forked; Validators disagree"
    FromRun(watched.board, AlarmSettings()).read(Snapshot(Head("run", problems=[words])), 0.0)
    assert not watched.names


def test_the_worst_comes_first() -> None:
    watched = Watched()
    watched.board.sign("clock_wrong", "an hour")
    watched.board.sign("log_forked", "forked")
    found: list[Alarm] = watched.board.active
    assert [each.severity for each in found] == ["page", "warn"]


def test_a_standbys_bundle_is_old_only_while_the_run_goes_on(tmp_path: Path) -> None:
    peer = Peer(tmp_path, bundle_seconds=100)
    has = {"step": 40, "lineage": 0, "bytes": 1}
    peer.emit("standby.standing_by", **has, age_seconds=1e6, steps_behind=0)
    peer.emit("standby.standing_by", **has, age_seconds=99.0, steps_behind=7)
    assert peer.names == []
    peer.emit("standby.standing_by", **has, age_seconds=101.0, steps_behind=7)
    assert peer.names == ["bundle_old"]
    (alarm,) = peer.board.active
    assert "of step 40, is 101 s old; the run has gone on for 7 steps since" in alarm.sentence
    peer.emit("standby.unpacked", step=40, lineage=0)
    assert peer.names == []


def test_a_disk_that_cannot_be_asked_is_an_alarm_and_no_end(tmp_path: Path) -> None:
    peer = Peer(tmp_path / "taken away")
    peer.signs.look()
    (alarm,) = peer.board.active
    assert alarm.name == "disk_low"
    assert alarm.sentence.endswith("taken away cannot be asked (No such file or directory)")
