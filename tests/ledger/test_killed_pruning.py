"""A process that is killed while it prunes leaves all entries or none, and prunes again."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import trio
from blake3 import blake3

from swarm.ledger.sealing import Books
from tests.ledger.harness import ALICE, BOB, TRAINER, InlineDatabase, in_virtual_time
from tests.ledger.test_epochs import Run, a_swarm, honest_block


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a validator that may prune an epoch of three logs, and has not yet."""
    folder = tmp_path_factory.mktemp("homes")

    async def main() -> None:
        swarm = a_swarm(folder)
        async with (
            swarm.peer(TRAINER) as trainer,
            swarm.peer(ALICE) as alice,
            swarm.peer(BOB) as bob,
        ):
            peers = (trainer, alice, bob)
            run = Run(swarm, peers)
            await run.advance(25)
            await run.look(rounds=0)
            for peer, block in [(each, honest_block(run, each)) for each in peers]:
                await peer.trusted.append(block)
            await run.look(rounds=0)

    in_virtual_time(main)
    return folder / BOB.peer_id / "ledger.sqlite"


def content(database: InlineDatabase) -> bytes:
    """Digest of all rows of all tables."""
    hasher = blake3()
    for (table,) in database.read("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1"):
        for row in sorted(map(repr, database.read(f"SELECT * FROM {table} ORDER BY 1"))):
            hasher.update(f"{table} {row}".encode())
    return hasher.digest()


def prune(path: Path, owner: str, kill_at: int | None = None) -> int:
    """Prune a log, and die before the SQL statement `kill_at`; returns how many there were."""
    database = InlineDatabase(path)
    statements = 0

    def count(sql: str) -> None:
        nonlocal statements
        statements += 1
        if statements == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    async def main() -> None:
        seals = Books(database, BOB.peer_id).seals()
        database._connection.set_trace_callback(count)
        assert await Books(database, BOB.peer_id).prune(seals[owner][0], seals[BOB.peer_id][0]) > 10

    trio.run(main)
    database.close()
    return statements


@pytest.mark.parametrize("owner", [ALICE.peer_id, BOB.peer_id], ids=["mirror", "own log"])
def test_killed_at_any_statement_it_leaves_old_or_new(
    source: Path, tmp_path: Path, owner: str
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(source.parent, whole)
    before = content(InlineDatabase(whole / source.name))
    statements = prune(whole / source.name, owner)
    after = content(InlineDatabase(whole / source.name))
    assert before != after
    steps = sorted({1, 2, 3, *range(4, statements, max(1, statements // 8)), statements})
    for number, kill_at in enumerate(steps):
        folder = tmp_path / str(number)
        shutil.copytree(source.parent, folder)
        child = os.fork()
        if child == 0:
            try:
                prune(folder / source.name, owner, kill_at)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert content(InlineDatabase(folder / source.name)) == before, "killed before the commit"
        prune(folder / source.name, owner)
        assert content(InlineDatabase(folder / source.name)) == after
