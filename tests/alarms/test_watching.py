"""A run that is watched from outside: its alarms on the page and on standard error."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from swarm.look.alarms.ringing import ringing
from swarm.look.alarms.watching import peers_page, watching
from swarm.look.dashboard.feed import Feed
from swarm.look.dashboard.snapshot import Head, Snapshot
from swarm.look.dashboard.watch import Watcher, watch
from swarm.run.run import Run
from swarm.settings import AlarmSettings
from tests.dashboard.harness import order
from tests.ledger.harness import ALICE, BOB, TRAINER, WORKER, Swarm, in_virtual_time

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


def test_a_run_whose_trusted_peers_have_all_died_rings(tmp_path: Path) -> None:
    async def main() -> None:
        lab = Swarm(tmp_path)
        async with (
            lab.apart(WORKER) as peer,
            watching(AlarmSettings(no_step_seconds=600.0), peer.node, lab.run) as amend,
            trio.open_nursery() as nursery,
        ):
            feed = Feed(Snapshot(Head(lab.run)))
            watcher = Watcher(peer.node, Run(peer.run_node.run.manifest_envelope))
            async with lab.peer(TRAINER) as trainer, lab.peer(ALICE), lab.peer(BOB):
                await trainer.run_node.announce(order(3), 1e6)
                await trio.sleep(11)
                nursery.start_soon(watch, watcher, feed, amend)
                await trio.sleep(60)
                assert (feed.snapshot.head.step, feed.snapshot.head.alarms) == (3, [])
            await trio.sleep(120)
            head = feed.snapshot.head
            assert [each.name for each in head.alarms] == ["trusted_silent"]
            assert head.trainer.startswith("No trusted peer of the run answers: all that this")
            await trio.sleep(600)
            assert [each.name for each in feed.snapshot.head.alarms] == [
                "no_step",
                "trusted_silent",
            ]
            async with lab.peer(TRAINER), lab.peer(ALICE), lab.peer(BOB):
                await trio.sleep(60)
                assert "trusted_silent" not in [each.name for each in feed.snapshot.head.alarms]
            nursery.cancel_scope.cancel()

    in_virtual_time(main)


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
