"""Signed turns that wait to be stored."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import trio

from peers.environment.turns import SignedTurns
from swarm.envelope import Envelope, seal
from swarm.identity import Identity
from swarm.turns import Turn
from swarm.world.disk import LocalDisk

OWN = Identity(bytes(32))


def signed(sample: int) -> Envelope:
    turn = Turn(seed=bytes(32), group=0, sample=sample, index=1, before=bytes(32))
    return seal(OWN, turn, run="run", sequence=sample, wall_time=1.0, lifetime_seconds=60.0)


def test_a_failure_to_store_loses_no_turn_of_another_task(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    turns = SignedTurns(disk)

    async def keep(sample: int) -> None:
        await turns.keep(signed(sample), (0, 0), (0, 0))

    async def check() -> None:
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

    trio.run(check)
