"""The queue of cases over a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from sqlite3 import Connection

import pytest
from blake3 import blake3

from peers.validator.cases import Case
from peers.validator.docket import Docket
from peers.validator.inbox import Inbox, path_of
from peers.validator.queue import CaseQueue
from swarm.events import Event, Events
from swarm.run.run import Run
from swarm.wire.messages import Submission
from swarm.world import Database
from swarm.world.disk import LocalDisk
from tests.network.harness import identity, manifest, sealed, sealed_manifest
from tests.validator.test_docket import HERE, WORKER, order, signed, verdict
from tests.worlds import VirtualWorld

pytestmark = pytest.mark.wall_clock


class Life:
    """One process of a validator, on a disk that outlives it."""

    def __init__(self, disk: LocalDisk) -> None:
        run = Run(sealed_manifest(identity(1), manifest([identity(1)], [identity(1)])))
        self.said: list[Event] = []
        events = Events(VirtualWorld(1), "validator")
        events.add_sink(self.said.append)
        self.docket = Docket(HERE.peer_id)
        self.inbox = Inbox(run, disk, VirtualWorld(1), judged=lambda _: False)
        self.database: Database = disk.database("validator.sqlite")
        self.queue = CaseQueue(
            self.database, self.docket, self.inbox, events, lanes=2, is_proven=lambda _: True
        )

    def stored(self) -> int:
        return len(self.database.read("SELECT digest FROM unjudged ORDER BY digest"))


def case(number: int) -> Case:
    submission = Submission(
        lineage=0, step=5, policy=5, number=number, digest=blake3(b"5 %d" % number).digest(),
        size_bytes=1, groups=1, run_digest=bytes(32),
    )  # fmt: skip
    return Case(sealed(WORKER, submission, "owner/run"), signed(order(5)))


async def acknowledge(disk: LocalDisk, *cases: Case) -> Life:
    life = Life(disk)
    await life.queue.open()
    for each in cases:
        await disk.write(path_of(each.key), b"x")
        await life.queue.add(each)
    return life


async def test_a_case_that_was_judged_before_the_crash_is_not_judged_again(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    await acknowledge(disk, case(0), case(1))
    life = Life(disk)
    life.docket.hear(verdict(0))
    await life.queue.open()
    assert [each.submission.number for each in life.queue.cases()] == [1]
    assert life.stored() == 1 and life.said == []


async def test_restored_cases_are_judged_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    await acknowledge(disk, *map(case, range(8)))
    life = Life(disk)
    await life.queue.open()
    for number in range(8):
        judged = await life.queue.next()
        assert judged.submission.number == number
        life.queue.done(judged, 1.0)


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("announced", lambda raw: raw[:-1]),
        ("arranged", lambda raw: raw[1:]),
        ("arranged", lambda _: b""),
    ],
)
async def test_cases_of_another_version_of_swarm_are_dropped_and_said_once(
    tmp_path: Path, column: str, change: Callable[[bytes], bytes]
) -> None:
    disk = LocalDisk(tmp_path)
    life = await acknowledge(disk, case(0), case(1), case(2))
    rows = life.database.read(f"SELECT digest, {column} FROM unjudged ORDER BY digest")
    for digest, raw in rows[:2]:
        await life.database.transact(_setting(column, digest, change(raw)))
    life = Life(disk)
    await life.queue.open()
    assert len(life.queue.cases()) == life.stored() == 1
    assert [event.name for event in life.said] == ["validator.cases_dropped"]
    assert life.said[0].fields["cases"] == 2 and str(life.said[0])


def _setting(column: str, digest: bytes, value: bytes) -> Callable[[Connection], None]:
    def change(connection: Connection) -> None:
        connection.execute(f"UPDATE unjudged SET {column} = ? WHERE digest = ?", (value, digest))

    return change
