from __future__ import annotations

import copy
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.shardcast import limits
from swarm.shardcast.manifest import (
    BadManifest,
    CheckpointManifest,
    build,
    cut,
    parse,
    piece_size_for,
)
from tests.shardcast.harness import put_folder
from tests.shardcast.memory_disk import MemoryDisk

SIZE = limits.PIECE_BYTES_MIN
names = st.from_regex(
    r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}(/[A-Za-z0-9_-][a-z.]{0,9})?", fullmatch=True
)


def raw_manifest(sizes: dict[str, int], piece_size: int = SIZE) -> list[Any]:
    """A correct manifest as the list that is on the wire, ready to be spoilt."""
    pieces = [
        [file, offset, size, bytes([number % 256]) * 32]
        for number, (file, offset, size) in enumerate(cut(list(sizes.values()), piece_size))
    ]
    files = [[name, size, b"s" * 32] for name, size in sizes.items()]
    return ["owner/run", 0, 3, piece_size, files, pieces]


def parsed(raw: list[Any]) -> CheckpointManifest:
    return parse(msgspec.msgpack.encode(raw))


def test_piece_size_is_the_nearest_power_of_two_within_bounds() -> None:
    kib, mib, gib = 1 << 10, 1 << 20, 1 << 30
    assert piece_size_for(0) == 256 * kib
    assert piece_size_for(512 * mib) == 256 * kib
    assert piece_size_for(767 * mib) == 256 * kib
    assert piece_size_for(769 * mib) == 512 * kib
    assert piece_size_for(2 * gib) == 1 * mib
    assert piece_size_for(62 * 10**9) == 32 * mib
    assert piece_size_for(10**13) == 32 * mib
    assert -(-62 * 10**9 // (32 * mib)) >= 1800


def test_a_file_of_a_small_checkpoint_is_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SMALL_BYTES", 1 << 20)
    assert piece_size_for(0) == piece_size_for((1 << 20) - 1) == 1 << 20
    assert piece_size_for(1 << 20) == 256 * 1024


@given(st.dictionaries(names, st.integers(0, 5 * SIZE), min_size=1, max_size=6))
def test_what_is_right_is_read_back(sizes: dict[str, int]) -> None:
    raw = raw_manifest(sizes)
    folded = [name.casefold() for name in sizes]
    folders = {name.split("/")[0] for name in folded if "/" in name}
    if len(set(folded)) < len(folded) or folders & set(folded):
        with pytest.raises(BadManifest, match=r"twice|both a file and a folder"):
            parsed(raw)
        return
    manifest = parsed(raw)
    assert manifest.total_bytes == sum(sizes.values())
    assert parse(manifest.encode()) == manifest


@settings(max_examples=300)
@given(st.data())
def test_no_change_to_a_piece_passes(data: st.DataObject) -> None:
    raw = raw_manifest({"a": 3 * SIZE + 5, "b/c": 10, "d": SIZE})
    pieces = raw[5]
    match data.draw(st.sampled_from(["drop", "double", "swap", "field"])):
        case "drop":
            del pieces[data.draw(st.integers(0, len(pieces) - 1))]
        case "double":
            at = data.draw(st.integers(0, len(pieces) - 1))
            pieces.insert(at, copy.deepcopy(pieces[at]))
        case "swap":
            one, other = data.draw(
                st.lists(st.integers(0, len(pieces) - 1), min_size=2, max_size=2, unique=True)
            )
            pieces[one], pieces[other] = pieces[other], pieces[one]
        case _:
            piece = pieces[data.draw(st.integers(0, len(pieces) - 1))]
            at = data.draw(st.integers(0, 2))
            value = data.draw(st.integers(-(2**63), 2**64 - 1).filter(lambda v: v != piece[at]))
            piece[at] = value
    with pytest.raises(BadManifest):
        parsed(raw)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "/a", "a/b/c", ".hidden",
     "a/.hidden", "a\\b", "a\x00b", "a\n", "ä", "a" * 200, "C:evil", "a b"],
)  # fmt: skip
def test_path_tricks_are_refused(name: str) -> None:
    with pytest.raises(BadManifest, match="no plain file name"):
        parsed(raw_manifest({name: 5}))


@pytest.mark.parametrize("size", [0, 1, SIZE - 1, SIZE // 2, SIZE * 3, 2 * limits.PIECE_BYTES_MAX])
def test_odd_piece_sizes_are_refused(size: int) -> None:
    raw = raw_manifest({"a": 5})
    raw[3] = size
    with pytest.raises(BadManifest, match="not a power of two"):
        parsed(raw)


def test_counts_are_bounded_before_anything_is_cut() -> None:
    raw = raw_manifest({"a": 5})
    raw[4][0][1] = 2**53
    with pytest.raises(BadManifest, match="more than the 65536 allowed"):
        parsed(raw)
    with pytest.raises(BadManifest, match="1 to 4096 files, not 0"):
        parsed(raw_manifest({}))
    with pytest.raises(BadManifest, match="1 to 4096 files, not 4097"):
        parsed(raw_manifest({f"f{n}": 0 for n in range(4097)}))
    with pytest.raises(BadManifest, match="more than the 8388608 allowed"):
        parse(bytes(limits.CHECKPOINT_MANIFEST_BYTES_MAX + 1))


async def test_building_hashes_a_folder() -> None:
    disk = MemoryDisk()
    data = random.Random(0).randbytes(SIZE + 7)
    files = {"model.safetensors": data, "config.json": b"{}", "sub/x": b"", ".manifest": b"old"}
    await put_folder(disk, "made", files)
    manifest = await build(disk, "made", run="r", lineage=1, step=2)
    assert [file.name for file in manifest.files] == [
        "config.json", "model.safetensors", "sub/x",
    ]  # fmt: skip
    assert [(p.file, p.offset, p.size_bytes) for p in manifest.pieces] == [
        (0, 0, 2), (1, 0, SIZE), (1, SIZE, 7),
    ]  # fmt: skip
    assert manifest.pieces[2].digest == await disk.digest("made/model.safetensors", SIZE, 7)
    assert manifest.files[1].sha256 == await disk.sha256("made/model.safetensors")
    assert parse(manifest.encode()) == manifest
    with pytest.raises(BadManifest, match="1 to 4096 files"):
        await build(disk, "empty", run="r", lineage=1, step=2)
