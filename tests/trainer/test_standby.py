"""Bundles: what a standby gets, and what everybody else does not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from peers.trainer.saving import State
from peers.trainer.standby.bundle import (
    CHUNK_BYTES,
    FILES_MAX,
    BadBundle,
    BundleFile,
    Contents,
    decrypted,
    encrypted,
    file_name,
    parse_contents,
)
from peers.trainer.standby.following import CONTENTS, ROOT, whole_bundle
from simnet.disk import SimulatedDisk
from swarm.errors import DiskFullError
from swarm.events import Events
from swarm.shardcast.store import CheckpointStore
from swarm.wire.identity import Identity, sealed_for
from swarm.world.disk import LocalDisk
from tests.worlds import VirtualWorld

SECRET = bytes(range(32))
STANDBY, OTHER = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)


def contents(files: list[BundleFile], secret: bytes = SECRET) -> Contents:
    return Contents(run="o/r", lineage=0, step=3, saved_ms=0, secret=secret, files=files)


async def bundled(disk: SimulatedDisk, files: dict[str, bytes]) -> list[BundleFile]:
    for name, data in files.items():
        await disk.write(f"state/{name}", data)
    return await encrypted(disk, "state", "bundle", SECRET)


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    """On a real disk, at the sizes where chunks begin and end."""
    sizes = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]
    plain = {f"part-{size}.safetensors": bytes([size % 251]) * size for size in sizes}

    async def main() -> None:
        disk = LocalDisk(tmp_path)
        for name, data in plain.items():
            await disk.write(f"state/{name}", data)
        files = await encrypted(disk, "state", "bundle", SECRET)
        for index in range(len(files)):
            assert plain["part-1048576.safetensors"][:64] not in await disk.read(
                f"bundle/{file_name(index)}"
            )
        await decrypted(disk, "bundle", contents(files), "out")
        assert {name: await disk.read(f"out/{name}") for name in disk.list("out")} == plain

    trio.run(main)


def test_a_bundle_leaves_room_for_the_next_state() -> None:
    """A full disk would end the trainer, for the sake of its standby."""

    async def main() -> None:
        disk = SimulatedDisk(capacity_bytes=2_900_000)
        for name in ("moments", "weights"):
            await disk.write(f"state/{name}", bytes(500_000))
        with pytest.raises(DiskFullError, match=r"need 2,000,000 bytes, and 1,900,000 are free"):
            await encrypted(disk, "state", "bundle", SECRET)
        assert not disk.list("bundle")
        disk.capacity_bytes += 100_000
        assert len(await encrypted(disk, "state", "bundle", SECRET)) == 2

    trio.run(main)


@pytest.mark.parametrize(
    ("files", "size_bytes", "words"),
    [
        (FILES_MAX + 1, 0, r"has 4,097 files, and a bundle for the standbys holds at most 4,096"),
        (3, 2**40, r"has 3,298,534,883,328 bytes in 3 files, and a bundle for the standbys holds"),
    ],
)
def test_a_state_that_cannot_be_published_is_refused_before_it_is_encrypted(
    files: int, size_bytes: int, words: str
) -> None:
    async def main() -> None:
        disk = SimulatedDisk(capacity_bytes=2**44)
        for number in range(files):
            await disk.allocate(f"state/{number}", size_bytes)
        with trio.fail_after(30), pytest.raises(BadBundle, match=words):
            await encrypted(disk, "state", "bundle", SECRET)
        assert not disk.exists("bundle")

    trio.run(main)


@given(st.integers(0, 40), st.integers(0, 7))
def test_a_changed_bit_is_found(place: int, bit: int) -> None:
    async def main() -> None:
        disk = SimulatedDisk()
        files = await bundled(disk, {"state.json": b"what the trainer knows..."})
        raw = bytearray(await disk.read("bundle/0000"))
        raw[place] ^= 1 << bit
        await disk.write("bundle/0000", bytes(raw))
        with pytest.raises(BadBundle, match=r"state\.json of the bundle is damaged"):
            await decrypted(disk, "bundle", contents(files), "out")

    trio.run(main)


def test_files_that_have_not_changed_are_encrypted_to_the_same_bytes() -> None:
    """So their pieces are not sent again. Equal beginnings do not share a key stream."""

    async def main() -> None:
        disk = SimulatedDisk()
        await bundled(disk, {"base": b"a" * 100, "moments": b"m" * 100})
        first = [await disk.read(f"bundle/{file_name(index)}") for index in (0, 1)]
        await bundled(disk, {"moments": b"m" * 99 + b"n"})
        then = [await disk.read(f"bundle/{file_name(index)}") for index in (0, 1)]
        assert first[0] == then[0] and first[1][:64] != then[1][:64]

    trio.run(main)


def test_a_whole_bundle_is_told_from_one_in_transfer() -> None:
    """`swarm trainer restore` leaves a home alone that has one."""

    async def main() -> None:
        disk, world = SimulatedDisk(), VirtualWorld()
        store = CheckpointStore(disk, "o/r", Events(world, "standby"), root=ROOT)
        assert await whole_bundle(disk, "o/r") is None
        for step in (3, 12):
            await bundled(disk, {"state.json": b"what the trainer knows" * step})
            await store.publish("bundle", 0, step)
            assert await whole_bundle(disk, "o/r") == (State(0, 3) if step == 12 else None)
            await disk.write(f"{ROOT}/0-{step}{CONTENTS}", b"")
            assert await whole_bundle(disk, "o/r") == State(0, step)
        assert await whole_bundle(disk, "o/another") is None
        await disk.write(f"{ROOT}/0-12/0000", b"")
        assert await whole_bundle(disk, "o/r") == State(0, 3)

    trio.run(main)


def test_only_the_named_standby_opens_the_contents() -> None:
    raw = msgspec.msgpack.encode(contents([BundleFile("state.json", 3, bytes(32))]))
    sealed = sealed_for(STANDBY.peer_id, raw)
    assert SECRET not in sealed
    assert STANDBY.unsealed(sealed) == raw
    assert OTHER.unsealed(sealed) is None and STANDBY.unsealed(sealed[:-1]) is None
    assert parse_contents(raw).files[0].name == "state.json"


@pytest.mark.parametrize("name", ["../up", ".hidden", "", "a/b", "a\n"])
def test_names_of_files_are_plain(name: str) -> None:
    raw = msgspec.msgpack.encode(contents([BundleFile(name, 3, bytes(32))]))
    with pytest.raises(BadBundle, match="cannot be decoded"):
        parse_contents(raw)


def test_another_version_of_a_bundle_is_refused() -> None:
    raw = msgspec.msgpack.encode(msgspec.structs.replace(contents([]), version=9))
    with pytest.raises(BadBundle, match="has version 9, and this program reads 1"):
        parse_contents(raw)
