"""Signed turns that wait to be stored."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import trio

from peers.environment.pool import Asker, SignedTurns
from swarm.wire.envelope import Envelope, seal
from swarm.wire.identity import Identity
from swarm.wire.turns import Turn
from swarm.world.disk import LocalDisk

RUNNER = trio.run
OWN = Identity(bytes(32))


def signed(sample: int) -> Envelope:
    turn = Turn(seed=bytes(32), group=0, sample=sample, index=1, before=bytes(32))
    return seal(OWN, turn, run="run", sequence=sample, wall_time=1.0, lifetime_seconds=60.0)


async def test_a_failure_to_store_loses_no_turn_of_another_task(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    turns = SignedTurns(disk, 1 << 20)

    async def keep(sample: int) -> None:
        await turns.keep(signed(sample), (0, 0), (0, 0), Asker("worker", "network"))

    await turns.open()
    with sqlite3.connect(tmp_path / "turns.sqlite") as other:
        other.execute("ALTER TABLE turns RENAME TO away")
    with pytest.raises(sqlite3.OperationalError):
        await keep(0)
    with sqlite3.connect(tmp_path / "turns.sqlite") as other:
        other.execute("ALTER TABLE away RENAME TO turns")
    await keep(1)
    for sample in (0, 1):
        found = turns.find(signed(sample).expect(Turn))
        assert found is not None and found.expect(Turn).sample == sample
    turns.close()


async def test_turns_have_a_quota_in_bytes_until_their_step_is_old(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    size = len(signed(0).raw)
    flood, neighbour = Asker("flood", "one"), Asker("neighbour", "one")
    honest = Asker("honest", "two")
    turns = SignedTurns(disk, 16 * size)
    await turns.open()
    kept = 0
    while turns.has_room(flood):
        await turns.keep(signed(kept), (0, 1), (0, 0), flood)
        kept += 1
    assert kept == 2 and turns.has_room(neighbour), "an eighth for one worker"
    for number in range(6):
        await turns.keep(signed(10 + number), (0, 1), (0, 0), Asker(f"w{number}", "one"))
    assert not turns.has_room(neighbour) and turns.has_room(honest), "half for one network"
    turns.close()
    turns = SignedTurns(disk, 16 * size)
    await turns.open()
    assert not turns.has_room(flood) and turns.has_room(honest), "also after a restart"
    await turns.keep(signed(50), (0, 9), (0, 5), honest)
    assert turns.has_room(flood) and turns.has_room(neighbour), "their step is old"
    turns.close()
