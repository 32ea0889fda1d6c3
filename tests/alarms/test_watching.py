"""A run that is watched from outside: its alarms on the page and on standard error."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.app.alarms.watching import watching
from swarm.app.dashboard.snapshot import Head, Snapshot
from swarm.settings import AlarmSettings
from tests.ledger.harness import WORKER, Swarm, in_virtual_time


def test_an_alarm_of_a_run_is_on_the_page_and_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        run = Swarm(tmp_path)
        async with (
            run.apart(WORKER) as peer,
            watching(AlarmSettings(), peer.node, run.run) as amend,
        ):
            problem = "The log of x is forked: y."
            for _ in range(2):
                shown = amend(Snapshot(Head(run.run, problems=[problem])))
                assert shown.head.problems == [f"Alarm log_forked: {problem}", problem]
            assert len(peer.events("alarm.raised")) == 1

    in_virtual_time(main)
    assert "alarm log_forked (page): The log of x is forked: y.; its key" in capsys.readouterr().err
