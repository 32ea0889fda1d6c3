"""A run that is watched from outside: its alarms on the page and on standard error."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.app.alarms.ringing import ringing
from swarm.app.alarms.watching import peers_page, watching
from swarm.app.dashboard.snapshot import Head, Snapshot
from swarm.settings import AlarmSettings
from tests.ledger.harness import WORKER, Swarm, in_virtual_time

FORKED = Snapshot(Head("run", signs={"log_forked": "the log of x is forked: y"}))


def test_an_alarm_of_a_run_is_on_the_page_and_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        run = Swarm(tmp_path)
        async with (
            run.apart(WORKER) as peer,
            watching(AlarmSettings(), peer.node, run.run) as amend,
        ):
            for _ in range(2):
                (shown,) = amend(FORKED).head.alarms
                assert (shown.name, shown.sentence) == ("log_forked", "the log of x is forked: y")
            assert len(peer.events("alarm.raised")) == 1

    in_virtual_time(main)
    assert "alarm log_forked (page): the log of x is forked: y; its key" in capsys.readouterr().err


def test_a_peers_page_shows_its_own_alarms_and_those_of_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            Swarm(tmp_path).apart(WORKER) as peer,
            ringing(AlarmSettings(disk_free_share=0.0), peer.node) as own,
        ):
            amend = peers_page(AlarmSettings(), peer.node, own)
            own.sign("clock_wrong", "by an hour")
            own.sign("log_forked", "of z")
            assert [(each.name, each.sentence) for each in amend(FORKED).head.alarms] == [
                ("log_forked", "of z"),
                ("clock_wrong", "by an hour"),
            ]
            own.well("log_forked")
            assert {each.name for each in amend(FORKED).head.alarms} == {
                "log_forked",
                "clock_wrong",
            }
            raised = [each["alarm"] for each in peer.events("alarm.raised")]
            assert raised == ["clock_wrong", "log_forked"], "the run's are on the page alone"

    in_virtual_time(main)
