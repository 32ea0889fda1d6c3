"""The simulated disk: as the real one, with content in name only, and power cuts."""

from __future__ import annotations

import random
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from simnet.clock import run_virtual
from simnet.disk import PowerCut, SimulatedDisk
from simnet.extents import Extents, SimulatedSink, Symbol
from swarm.errors import DiskFullError
from swarm.world.disk import LocalDisk

RUNNER = partial(run_virtual, seed=1)

GIGABYTE = 10**9


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    return run_virtual(main, seed=1)


# --- extents ---


@given(st.lists(st.tuples(st.integers(0, 40), st.binary(min_size=1, max_size=20))))
def test_bytes_written_anywhere_read_as_from_an_array(writes: list[tuple[int, bytes]]) -> None:
    extents, array = Extents(), bytearray(60)
    for start, data in writes:
        extents.put(start, data)
        array[start : start + len(data)] = data
    found = bytearray(60)
    for start, content in extents.get(0, 60):
        assert isinstance(content, bytes)
        found[start : start + len(content)] = content
    assert found == array


@given(st.permutations(range(20)))
def test_a_symbol_that_arrives_in_parts_is_whole_again(order: list[int]) -> None:
    extents, whole = Extents(), Symbol("policy", 0, 200)
    for index in order:
        extents.put(10 * index, whole.part(10 * index, 10 * index + 10))
    assert extents.get(0, 200) == [(0, whole)]


# --- as the real disk ---

PATHS = st.sampled_from(["a", "b", "f/a", "f/b", "g/c"])
OPERATIONS = st.one_of(
    st.tuples(st.just("write"), PATHS, st.binary(max_size=30)),
    st.tuples(st.just("allocate"), PATHS, st.integers(0, 40)),
    st.tuples(st.just("land"), PATHS, st.integers(0, 20), st.binary(min_size=1, max_size=20)),
    st.tuples(st.just("rename"), PATHS, PATHS),
    st.tuples(st.just("remove"), st.sampled_from(["a", "b", "f/a", "f", "g"])),
    st.tuples(st.just("sync"), PATHS),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, max_size=12))
def test_it_answers_as_the_disk_of_this_machine_does(operations: list[tuple[Any, ...]]) -> None:
    async def apply(disk: Any) -> list[Any]:
        seen: list[Any] = []
        for name, path, *rest in operations:
            try:
                if name == "land":
                    sink = disk.sink(path, rest[0], len(rest[1]))
                    sink.write(rest[1])
                    piece = sink.finish()
                    assert piece.verify(blake3(rest[1]).digest())
                    await sink.commit(piece)
                else:
                    await getattr(disk, name)(path, *rest)
            except (FileNotFoundError, OSError) as error:
                seen.append(type(error) is FileNotFoundError)
            for known in ("a", "b", "f/a", "f/b", "g/c"):
                if disk.exists(known):
                    size = disk.size_bytes(known)
                    seen += [
                        size,
                        await disk.read(known),
                        await disk.read(known, 3, 5),
                        await disk.digest(known, 1, 4),
                        await disk.sha256(known),
                    ]
            seen += [disk.list("f"), disk.list("g")]
        return seen

    with tempfile.TemporaryDirectory() as folder:
        real = trio.run(apply, LocalDisk(Path(folder)))
    assert run(lambda: apply(SimulatedDisk())) == real


@pytest.mark.parametrize("path", ["", "/etc/passwd", "a/../b", "a/./b", "a//b", "a/", "a\0b"])
def test_a_path_out_of_the_home_is_refused(path: str) -> None:
    disk = SimulatedDisk()
    for operation in (disk.exists, disk.list, disk.size_bytes, disk.database, disk.local_path):
        with pytest.raises(ValueError, match="not a path within"):
            operation(path)


async def test_a_full_disk_says_how_much_is_missing_and_removal_makes_room() -> None:
    disk = SimulatedDisk(capacity_bytes=100)
    await disk.write("a", bytes(40))
    await disk.allocate("b", 50)
    assert disk.free_bytes() == 10
    with pytest.raises(DiskFullError, match="needs 20 bytes and 10 are free"):
        await disk.allocate("c", 20)
    with pytest.raises(DiskFullError):
        disk.sink("c", 0, 20).write(bytes(20))
    await disk.remove("a")
    await disk.rename("b", "c")
    await disk.allocate("c", 100)
    assert disk.free_bytes() == 0
    await disk.remove("c")
    assert disk.free_bytes() == 100


async def test_time_is_charged_for_bytes_and_syncs() -> None:
    disk = SimulatedDisk(bytes_per_second=1000, sync_seconds=2)
    await disk.write("a", bytes(500))
    assert trio.current_time() == 2.5
    await disk.read("a", 0, 250)
    assert trio.current_time() == 2.75
    await disk.database("d").transact(lambda connection: None)
    assert trio.current_time() == 4.75


# --- content in name only ---


async def test_gigabytes_without_bytes_are_hashed_sent_and_checked() -> None:
    ours, theirs = SimulatedDisk(), SimulatedDisk()
    size = 62 * GIGABYTE
    ours.put("model", 0, Symbol("policy 1", 0, size))
    await theirs.allocate("model", size)
    piece_bytes = size // 100
    for index in random.Random(1).sample(range(100), 100):
        offset = index * piece_bytes
        digest = await ours.digest("model", offset, piece_bytes)
        sink = theirs.sink("model", offset, piece_bytes)
        assert isinstance(sink, SimulatedSink)
        symbol = ours.symbol("model", offset, piece_bytes)
        assert symbol is not None
        sink.land(symbol)
        piece = sink.finish()
        assert piece.verify(digest)
        await sink.commit(piece)
    assert await theirs.sha256("model") == await ours.sha256("model")
    assert theirs.symbol("model", 0, size) == Symbol("policy 1", 0, size)
    with pytest.raises(OSError, match="in name only"):
        await theirs.read("model", 0, 10)


async def test_other_content_and_other_places_have_other_hashes() -> None:
    disk = SimulatedDisk()
    disk.put("a", 0, Symbol("a", 0, 100))
    disk.put("b", 0, Symbol("b", 0, 100))
    right = await disk.digest("a", 10, 20)
    for path, offset, size in (("b", 10, 20), ("a", 11, 20), ("a", 10, 21)):
        assert await disk.digest(path, offset, size) != right
    whole = await disk.sha256("a")
    disk.put("a", 50, b"forged")
    assert await disk.sha256("a") != whole
    assert await disk.digest("a", 40, 20) != await disk.digest("b", 40, 20)
    assert await disk.digest("a", 50, 6) == blake3(b"forged").digest()


# --- power ---


async def test_what_was_synced_survives_and_the_rest_may() -> None:
    outcomes = set()

    for seed in range(40):
        disk = SimulatedDisk()
        await disk.write("kept", b"kept")
        await disk.allocate("f/part", 8)
        await disk.sync("f")
        disk.put("f/part", 0, b"1234")
        disk.put("f/part", 4, b"5678")
        await disk.rename("kept", "moved")
        await disk.allocate("fresh", 4)
        disk.lose_power()
        with pytest.raises(PowerCut):
            disk.exists("kept")
        disk.recover(random.Random(seed))
        names = [name for name in ("kept", "moved", "fresh") if disk.exists(name)]
        assert names in (["kept"], ["moved"], ["moved", "fresh"])  # in order, never halfway
        assert await disk.read(names[0]) == b"kept"
        part = await disk.read("f/part")
        assert part[:4] in (b"1234", bytes(4))
        assert part[4:] in (b"5678", bytes(4))
        used = sum(disk.size_bytes(name) for name in [*names, "f/part"])
        assert disk.free_bytes() == disk.capacity_bytes - used
        outcomes.add((tuple(names), part))
    assert len(outcomes) == 3 * 4


async def test_a_transaction_that_returned_survives_and_one_under_way_never_was() -> None:
    disk = SimulatedDisk(sync_seconds=1)
    database = disk.database("d")

    def insert(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE IF NOT EXISTS t (x)")
        connection.execute("INSERT INTO t VALUES (1)")

    await database.transact(insert)

    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO t VALUES (2)")
        raise KeyError("on purpose")

    with pytest.raises(KeyError):
        await database.transact(fail)
    assert database.read("SELECT x FROM t ORDER BY x") == [(1,)]

    async def under_way() -> None:
        with pytest.raises(PowerCut):
            await database.transact(insert)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(under_way)
        await trio.sleep(0.5)
        disk.lose_power()
    disk.recover(random.Random(1))
    assert disk.database("d").read("SELECT x FROM t ORDER BY x") == [(1,)]
    disk.close()
