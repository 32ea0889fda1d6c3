from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.ledger import merkle
from swarm.ledger.entries import CheckpointPublished, Consumed, Evicted, decode, encode
from swarm.ledger.log import Log, Pruned
from swarm.ledger.mirror import Fork, LogMirror
from swarm.wire.envelope import Envelope
from swarm.wire.messages import LogHead
from swarm.world.disk import LocalDisk
from tests.ledger.harness import ALICE, BOB, sealed

RUN = "run"


def checkpoint(step: int, lineage: int = 0) -> CheckpointPublished:
    return CheckpointPublished(lineage=lineage, step=step, manifest=bytes(32))


async def a_log(folder: Path, owner: str = ALICE.peer_id) -> tuple[Log, LocalDisk]:
    disk = LocalDisk(folder)
    database = disk.database("ledger.sqlite")
    await LogMirror.create_tables(database)
    return Log(database, owner), disk


def signed(log: Log, sequence: int, size: int | None = None, root: bytes | None = None) -> Envelope:
    size = log.size() if size is None else size
    return sealed(
        ALICE,
        LogHead(size=size, root=log.root(size) if root is None else root),
        RUN,
        sequence=sequence,
    )


# --- entries ---


@given(
    st.builds(
        Consumed,
        step=st.integers(0, 2**54),
        submission=st.binary(min_size=32, max_size=32),
        outcomes=st.lists(
            st.sampled_from(["consumed", "zero-advantage", "stale", "carried", "unreadable"]),
            max_size=9,
        ),
    )
)
def test_entries_survive_encoding(entry: Consumed) -> None:
    if entry.step > 2**53:
        with pytest.raises(ValueError, match="malformed"):
            decode(encode(entry))
    else:
        assert decode(encode(entry)) == entry


def test_an_entry_is_bounded() -> None:
    with pytest.raises(ValueError, match="at most"):
        encode(Evicted(peer=ALICE.peer_id, reason="", envelope=bytes(100_000)))
    with pytest.raises(ValueError, match="at most"):
        decode(bytes(100_000))


# --- the log ---


async def test_a_log_survives_a_restart_and_proves_its_entries(tmp_path: Path) -> None:
    log, _ = await a_log(tmp_path)
    assert log.head() == (0, merkle.EMPTY_ROOT)
    heads = []
    for step in range(13):
        assert await log.append([checkpoint(step)]) == range(step, step + 1)
        heads.append(log.head())
    assert await log.append([checkpoint(13), checkpoint(14)]) == range(13, 15)
    log._database.close()
    log, _ = await a_log(tmp_path)
    size, root = log.head()
    assert size == 15
    assert [decode(raw) for raw in log.entries(12, 100)] == [checkpoint(n) for n in (12, 13, 14)]
    assert log.entry_sizes(12, 2) == [len(raw) for raw in log.entries(12, 2)]
    for index, raw in enumerate(log.entries(0, 15)):
        leaf = merkle.leaf_hash(raw)
        assert merkle.verify_inclusion(leaf, index, size, log.inclusion(index, size), root)
    for old, old_root in heads:
        proof = log.consistency(old, size)
        assert merkle.verify_consistency(old, size, old_root, root, proof)
    for ask in (log.inclusion, log.consistency):
        with pytest.raises(ValueError, match="15 entries"):
            ask(1, 16)
    log._database.close()


async def test_an_append_that_fails_leaves_nothing(tmp_path: Path) -> None:
    log, _ = await a_log(tmp_path)
    await log.append([checkpoint(0)])
    before = log.head()

    def refuse(_connection: sqlite3.Connection, first: int) -> None:
        assert first == 1
        raise RuntimeError("the other half failed")

    with pytest.raises(RuntimeError, match="other half"):
        await log.append([checkpoint(1)], refuse)
    assert log.head() == before
    assert await log.append([checkpoint(2)]) == range(1, 2)
    log._database.close()


# --- mirrors ---


async def both(folder: Path, steps: Sequence[int]) -> tuple[Log, LogMirror]:
    log, _ = await a_log(folder / "owner")
    if steps:
        await log.append([checkpoint(step) for step in steps])
    copy, _ = await a_log(folder / "mirror")
    return log, LogMirror(copy._database, ALICE.peer_id)


def close(log: Log, mirror: LogMirror) -> None:
    log._database.close()
    mirror._database.close()


async def test_a_mirror_follows_in_parts(tmp_path: Path) -> None:
    log, mirror = await both(tmp_path, range(10))
    ten = signed(log, 1)
    await mirror.extend(ten, log.entries(0, 4), log.consistency(4, 10))
    assert mirror.head() is None, "a head is handed out only with all its entries"
    await log.append([checkpoint(10)])
    eleven = signed(log, 2)
    await mirror.extend(eleven, log.entries(4, 3), log.consistency(7, 11))
    await mirror.extend(eleven, log.entries(7, 4))
    assert mirror.head() == eleven
    assert mirror.log.head() == log.head()
    await mirror.extend(ten, [])
    assert mirror.head() == eleven, "an older head changes nothing"
    close(log, mirror)


async def test_a_mirror_believes_no_entry_its_owner_did_not_sign(tmp_path: Path) -> None:
    log, mirror = await both(tmp_path, range(6))
    head = signed(log, 1)
    raws = log.entries(0, 6)
    for bad in ([*raws[:5], encode(checkpoint(99))], raws[:5], raws[::-1], [*raws, raws[0]]):
        with pytest.raises(Fork):
            await mirror.extend(head, bad)
        assert mirror.log.size() == 0
    with pytest.raises(Fork):
        await mirror.extend(head, [encode(checkpoint(99))], log.consistency(1, 6))
    with pytest.raises(ValueError, match="not a head of"):
        await mirror.extend(sealed(BOB, head.message, RUN), raws)
    assert mirror.log.size() == 0
    await mirror.extend(head, raws)
    close(log, mirror)


async def test_forks_and_shrinking_show(tmp_path: Path) -> None:
    log, mirror = await both(tmp_path, range(6))
    await mirror.extend(signed(log, 1), log.entries(0, 6))
    with pytest.raises(Fork, match="shrank from 6 to 4"):
        await mirror.extend(signed(log, 2, size=4), [])
    other, _ = await a_log(tmp_path / "other")
    await other.append([checkpoint(step, lineage=1) for step in range(8)])
    with pytest.raises(Fork, match="forked"):
        await mirror.extend(signed(other, 3, size=6), [])
    with pytest.raises(Fork, match="forked"):
        await mirror.extend(signed(other, 3), other.entries(6, 2))
    assert mirror.log.head() == log.head()
    other._database.close()
    close(log, mirror)


async def test_a_head_seen_before_its_entries_came_is_not_forgotten(tmp_path: Path) -> None:
    """The owner shows a head of 6, breaks off after 3 entries, and goes on with another log."""
    log, mirror = await both(tmp_path, range(6))
    await mirror.extend(signed(log, 1), log.entries(0, 3), log.consistency(3, 6))
    other, _ = await a_log(tmp_path / "other")
    await other.append([decode(raw) for raw in log.entries(0, 3)])
    await other.append([checkpoint(step, lineage=1) for step in range(5)])
    with pytest.raises(Fork, match="signed another head of 6"):
        await mirror.extend(signed(other, 2), other.entries(3, 5))
    other._database.close()
    close(log, mirror)


# --- pruning ---


@pytest.mark.parametrize("start", [1, 2, 5, 8, 12, 13])
async def test_a_pruned_log_proves_what_is_left_as_before(tmp_path: Path, start: int) -> None:
    whole, _ = await a_log(tmp_path / "whole")
    pruned, disk = await a_log(tmp_path / "pruned")
    for log in (whole, pruned):
        await log.append([checkpoint(step) for step in range(13)])
    database = disk.database("ledger.sqlite")
    await database.transact(lambda connection: pruned.prune_within(connection, start))
    for log in (whole, pruned):
        await log.append([checkpoint(step) for step in range(13, 21)])
    assert pruned.head() == whole.head()
    for size in range(start, 22):
        assert pruned.root(size) == whole.root(size)
        for index in range(start, size):
            assert pruned.inclusion(index, size) == whole.inclusion(index, size)
            assert pruned.consistency(index, size) == whole.consistency(index, size)
    for ask in (
        lambda: pruned.entries(start - 1, 9),
        lambda: pruned.inclusion(start - 1, 20),
        lambda: pruned.consistency(start - 1, 20) if start > 1 else pruned.entries(0, 1),
    ):
        with pytest.raises(Pruned, match="sealed and pruned"):
            ask()
    # whoever begins there finds the same
    begun, other = await a_log(tmp_path / "begun")
    peaks = pruned.peaks()
    await other.database("ledger.sqlite").transact(
        lambda connection: begun.begin_within(connection, start, peaks)
    )
    await begun.append([decode(raw) for raw in pruned.entries(start, 99)])
    assert begun.head() == whole.head()
