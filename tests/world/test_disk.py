from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path

import pytest
import trio
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import DamagedError, DiskFullError
from swarm.world.disk import LocalDisk

pytestmark = pytest.mark.wall_clock


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


# --- paths ---


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "..", "a/../b", "a/./b", "./a", "a//b", "a/", "a\0b", "../a"]
)
async def test_a_path_out_of_the_home_is_refused_by_every_operation(
    tmp_path: Path, path: str
) -> None:
    disk = LocalDisk(tmp_path / "home")
    for operation in (
        lambda: disk.read(path),
        lambda: disk.write(path, b"x"),
        lambda: disk.allocate(path, 1),
        lambda: disk.copy(path, 0, 1, disk.sink("b", 0, 1)),
        lambda: disk.digest(path, 0, 1),
        lambda: disk.sha256(path),
        lambda: disk.sync(path),
        lambda: disk.rename(path, "b"),
        lambda: disk.rename("b", path),
        lambda: disk.remove(path),
    ):
        with pytest.raises(ValueError, match="not a path within"):
            await operation()
    for at_once in (
        lambda: disk.sink(path, 0, 1),
        lambda: disk.exists(path),
        lambda: disk.size_bytes(path),
        lambda: disk.list(path),
        lambda: disk.database(path),
        lambda: disk.local_path(path),
    ):
        with pytest.raises(ValueError, match="not a path within"):
            at_once()
    assert files(tmp_path) == set()


@given(st.text(min_size=1, max_size=30))
def test_no_text_names_a_file_outside(path: str) -> None:
    disk = LocalDisk(Path("/tmp"))
    try:
        local = disk.local_path(path)
    except ValueError:
        return
    assert Path(os.path.normpath(local)).is_relative_to("/tmp")
    assert Path(os.path.normpath(local)) != Path("/tmp")


# --- whole files ---


async def test_write_replaces_and_read_gives_ranges(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    await disk.write("a/b/c", b"old")
    await disk.write("a/b/c", b"0123456789")
    assert await disk.read("a/b/c") == b"0123456789"
    assert await disk.read("a/b/c", 3) == b"3456789"
    assert await disk.read("a/b/c", 3, 2) == b"34"
    assert await disk.read("a/b/c", 8, 100) == b"89"
    assert await disk.read("a/b/c", 50) == b""
    assert disk.size_bytes("a/b/c") == 10
    assert disk.list("a") == ["b"]
    assert disk.list("nowhere") == []
    assert disk.exists("a/b/c")
    assert not disk.exists("a/b/d")
    for missing in (lambda: disk.read("nope"), lambda: disk.sha256("nope")):
        with pytest.raises(FileNotFoundError):
            await missing()
    with pytest.raises(FileNotFoundError):
        disk.size_bytes("nope")
    assert files(tmp_path) == {"a/b/c"}


async def test_a_write_that_fails_leaves_the_old_file_and_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = LocalDisk(tmp_path)
    await disk.write("file", b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match="free some space"):
        await disk.write("file", b"new")
    monkeypatch.undo()
    assert await disk.read("file") == b"old"
    assert files(tmp_path) == {"file"}


async def test_writes_at_the_same_time_end_with_one_of_them_whole(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    contents = [bytes([n]) * (200_000 + n) for n in range(12)]
    async with trio.open_nursery() as nursery:
        for content in contents:
            nursery.start_soon(disk.write, "file", content)
    assert await disk.read("file") in contents
    assert files(tmp_path) == {"file"}


async def test_what_a_power_cut_left_aside_is_not_listed(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    await disk.write("folder/file", b"whole")
    (tmp_path / "folder" / "other.0.aside").write_bytes(b"half")
    assert disk.list("folder") == ["file"]


async def test_hashes_are_those_of_the_bytes(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    data = os.urandom(3 << 20)
    await disk.write("file", data)
    assert await disk.sha256("file") == hashlib.sha256(data).digest()

    async def write_more(offset: int) -> int:
        """A MiB after `offset` is written; what is before it was read and may change."""
        path = tmp_path / "growing"
        end = offset + (1 << 20)
        path.write_bytes(bytes(offset) + data[offset:end] + bytes((3 << 20) - end))
        return end

    await disk.write("growing", bytes(3 << 20))
    assert await disk.sha256("growing", write_more) == hashlib.sha256(data).digest()
    assert await disk.digest("file", 1000, 2 << 20) == (
        blake3(data[1000 : 1000 + (2 << 20)]).digest()
    )
    assert await disk.digest("file", 3 << 20, 10) == blake3(b"").digest()


async def test_rename_and_remove(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    await disk.write("a/x", b"1")
    await disk.write("b/y", b"2")
    await disk.rename("a/x", "new/folder/x")
    assert await disk.read("new/folder/x") == b"1"
    await disk.rename("new/folder/x", "b/y")
    assert await disk.read("b/y") == b"1"
    await disk.write("c/z", b"3")
    with pytest.raises(OSError, match="not empty"):
        await disk.rename("c", "b")
    await disk.remove("b")
    await disk.remove("b")
    await disk.remove("never/was")
    assert not disk.exists("b")
    await disk.remove("c/z")
    assert disk.list("c") == []


# --- durability ---


async def test_what_is_synced_includes_every_folder_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    disk = LocalDisk(tmp_path)
    await disk.write("a/b/file", b"x")
    assert {str(tmp_path / "a/b"), str(tmp_path / "a"), str(tmp_path)} <= synced
    for name in ("tree/one", "tree/deep/two"):
        sink = disk.sink(name, 0, 1)
        sink.write(b"x")
        await sink.commit(sink.finish())
    synced.clear()
    await disk.sync("tree")
    wanted = ("tree", "tree/one", "tree/deep", "tree/deep/two", "")
    assert {str(tmp_path / name) for name in wanted} <= synced
    synced.clear()
    await disk.sync("tree/one")
    assert {str(tmp_path / "tree/one"), str(tmp_path / "tree")} <= synced


# --- sinks ---


async def test_a_sink_fills_its_range_and_hashes_as_it_goes(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    await disk.allocate("file", 10)
    sink = disk.sink("file", 4, 4)
    sink.write(b"ab")
    sink.write(memoryview(b"cd"))
    with pytest.raises(ValueError, match="more than the 4 bytes"):
        sink.write(b"e")
    piece = sink.finish()
    assert piece.size_bytes == 4
    assert piece.verify(blake3(b"abcd").digest())
    assert not piece.verify(blake3(b"abce").digest())
    await sink.commit(piece)
    sink.abandon()
    assert await disk.read("file") == bytes(4) + b"abcd" + bytes(2)
    await disk.allocate("file", 10)
    assert await disk.read("file", 4, 4) == b"abcd"


async def test_a_range_is_copied_into_a_sink(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    await disk.write("a", b"0123456789")
    await disk.allocate("b", 6)
    sink = disk.sink("b", 1, 4)
    await disk.copy("a", 3, 4, sink)
    piece = sink.finish()
    assert piece.verify(blake3(b"3456").digest())
    await sink.commit(piece)
    assert await disk.read("b") == b"\0003456\0"


async def test_a_short_piece_cannot_be_committed(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    sink = disk.sink("file", 0, 4)
    sink.write(b"abc")
    with pytest.raises(ValueError, match="3 bytes arrived of 4"):
        await sink.commit(sink.finish())
    sink.abandon()
    sink.abandon()


# --- room ---


async def test_a_quota_bounds_writes_allocations_and_sinks(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path, quota_bytes=1000)
    assert disk.free_bytes() == 1000
    await disk.write("a", bytes(400))
    assert disk.free_bytes() == 600
    with pytest.raises(DiskFullError, match="quota"):
        await disk.write("b", bytes(601))
    with pytest.raises(DiskFullError, match="quota"):
        await disk.allocate("b", 601)
    sink = disk.sink("b", 0, 601)
    with pytest.raises(DiskFullError, match="quota"):
        sink.write(b"x")
    assert files(tmp_path) == {"a"}
    await disk.allocate("b", 600)
    assert disk.free_bytes() == 0
    await disk.allocate("b", 600)
    held = disk.sink("b", 100, 500)
    held.write(bytes(500))
    await held.commit(held.finish())
    await disk.remove("a")
    assert disk.free_bytes() == 400


# --- databases ---


async def test_a_transaction_is_all_or_nothing_and_survives_reopening(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    database = disk.database("folder/state.sqlite")
    await database.transact(lambda c: c.execute("CREATE TABLE t (x INTEGER PRIMARY KEY)"))

    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO t VALUES (1)")
        seen = trio.from_thread.run_sync(database.read, "SELECT x FROM t ORDER BY x")
        assert seen == [], "a read saw half of it"
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await database.transact(fail)
    async with trio.open_nursery() as nursery:
        for x in range(20):
            nursery.start_soon(
                database.transact, lambda c, x=x: c.execute("INSERT INTO t VALUES (?)", (x,))
            )
    database.close()
    again = disk.database("folder/state.sqlite")
    assert again.read("SELECT COUNT(*) FROM t ORDER BY 1") == [(20,)]
    assert again.read("PRAGMA journal_mode") == [("wal",)]
    again.close()


async def test_a_cancelled_transaction_ends_before_the_next_begins(tmp_path: Path) -> None:
    database = LocalDisk(tmp_path).database("state.sqlite")
    await database.transact(lambda c: c.execute("CREATE TABLE t (x INTEGER)"))
    with trio.CancelScope() as scope:

        def insert(connection: sqlite3.Connection) -> None:
            trio.from_thread.run_sync(scope.cancel)
            connection.execute("INSERT INTO t VALUES (1)")

        await database.transact(insert)
    assert database.read("SELECT x FROM t ORDER BY x") == [(1,)]
    await database.transact(lambda c: c.execute("INSERT INTO t VALUES (2)"))
    assert database.read("SELECT x FROM t ORDER BY x") == [(1,), (2,)]
    database.close()


async def test_a_database_that_cannot_grow_says_so_and_stays_usable(tmp_path: Path) -> None:
    database = LocalDisk(tmp_path).database("state.sqlite")

    def create(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE t (x BLOB)")
        connection.execute("PRAGMA max_page_count = 10")

    await database.transact(create)
    with pytest.raises(DiskFullError, match="cannot grow"):
        await database.transact(lambda c: c.execute("INSERT INTO t VALUES (?)", (bytes(100_000),)))
    await database.transact(lambda c: c.execute("INSERT INTO t VALUES (?)", (b"small",)))
    assert database.read("SELECT x FROM t ORDER BY x") == [(b"small",)]
    database.close()


async def test_reads_cannot_write(tmp_path: Path) -> None:
    database = LocalDisk(tmp_path).database("state.sqlite")
    await database.transact(lambda c: c.execute("CREATE TABLE t (x INTEGER)"))
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        database.read("INSERT INTO t VALUES (1)")
    database.close()


@pytest.mark.parametrize("where", [0, 5000], ids=["no database", "damaged inside"])
async def test_a_damaged_database_says_so_in_one_sentence(tmp_path: Path, where: int) -> None:
    disk = LocalDisk(tmp_path)
    database = disk.database("ledger.sqlite")
    await database.transact(lambda c: c.execute("CREATE TABLE t (x BLOB)"))
    await database.transact(
        lambda c: c.executemany("INSERT INTO t VALUES (?)", [(bytes(500),)] * 100)
    )
    database.close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as plain:
        plain.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    plain.close()
    with (tmp_path / "ledger.sqlite").open("r+b") as file:
        file.seek(where)
        file.write(b"\xff" * 8000)
    with pytest.raises(DamagedError, match=r"ledger.sqlite is damaged \(.*\); restore it"):
        disk.database("ledger.sqlite").read("SELECT x FROM t ORDER BY x")
