"""Delta files: exact for every format, and refused when they are damaged."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import trio
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from swarm.shardcast import delta as delta_module
from swarm.shardcast.delta import (
    BadDelta,
    Delta,
    DeltaService,
    apply_block,
    changed_positions,
    encode,
    encode_block,
    make,
    word_bytes_of,
)
from swarm.shardcast.jobs import EncodeDelta, MakePieces, PieceToMake

BLOCK = delta_module.DELTA_BLOCK_BYTES
WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1}


def safetensors(tensors: dict[str, tuple[str, bytes]], note: str = "") -> bytes:
    """A safetensors file of one-dimensional tensors: name → (dtype, raw values)."""
    header: dict[str, object] = {"__metadata__": {"note": note}}
    at = 0
    for name, (dtype, raw) in tensors.items():
        shape = [len(raw) // WIDTH[dtype]]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    data = b"".join(raw for _, raw in tensors.values())
    return len(encoded).to_bytes(8, "little") + encoded + data


def changed(raw: bytes, share: float, seed: int, width: int = 2) -> bytes:
    """Raw values of which a share moved by one unit in the last place."""
    rng = np.random.default_rng(seed)
    words = np.frombuffer(raw, f"<u{width}").copy()
    hit = rng.random(len(words)) < share
    words[hit] += rng.choice(np.array([1, 2 ** (8 * width) - 1], words.dtype), int(hit.sum()))
    return words.tobytes()


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def pieces_of(data: bytes, name: str, size: int = BLOCK, first: int = 0) -> list[PieceToMake]:
    return [
        PieceToMake(
            first + number, name, at, len(data[at : at + size]), _hash(data[at : at + size])
        )
        for number, at in enumerate(range(0, len(data), size))
    ]


def _hash(data: bytes) -> bytes:
    return blake3(data).digest()


def made(base: Path, target: Path, deltas: list[Path], name: str, data: bytes) -> list[int]:
    """Make one file from a chain; indices of the pieces that came out right."""
    write(target, {name: bytes(len(data))})
    return make(base, target, deltas, pieces_of(data, name))


# --- blocks ----------------------------------------------------------------------------------


@given(
    data=st.binary(max_size=300),
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=30),
    word=st.sampled_from([1, 2, 4, 8]),
)
def test_a_block_comes_back_bit_for_bit(
    data: bytes, edits: list[tuple[int, int]], word: int
) -> None:
    data = data[: len(data) // word * word]
    other = bytearray(data)
    for place, value in edits:
        if other:
            other[place % len(other)] = value
    old, new = np.frombuffer(data, np.uint8), np.frombuffer(bytes(other), np.uint8)
    positions = changed_positions(old, new, word)
    differ = [
        i for i in range(len(data) // word) if data[i * word :][:word] != other[i * word :][:word]
    ]
    assert positions.tolist() == differ
    payload = encode_block(old, new, word)
    assert bool(payload) == bool(differ)
    if payload:
        block = old.copy()
        apply_block(payload, block, word)
        assert block.tobytes() == bytes(other)


@pytest.mark.parametrize(
    ("wide", "difference", "reason"),
    [(254, 1, "states a narrow gap as a wide one"), (255, 0, "states a change by nothing")],
)
def test_a_block_that_nobody_encodes_is_refused(wide: int, difference: int, reason: str) -> None:
    def payload(wide: int, difference: int) -> bytes:
        return struct.pack("<IIBIB", 1, 1, 255, wide, difference)

    block = np.zeros(300, np.uint8)
    with pytest.raises(BadDelta, match=reason):
        apply_block(payload(wide, difference), block, 1)
    assert not block.any()
    apply_block(payload(255, 1), block, 1)
    assert block[255] == 255, "-1"


def test_wide_gaps_survive() -> None:
    old = np.zeros(BLOCK, np.uint8)
    new = old.copy()
    for place in (254, 255, 510, 766, 1023, 70_000, BLOCK - 1):
        new[place] = 7
    block = old.copy()
    apply_block(encode_block(old, new, 1), block, 1)
    assert np.array_equal(block, new)


# --- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(WIDTH))
@pytest.mark.parametrize("share", [0.0, 0.01, 0.4])
def test_every_format_comes_back_bit_for_bit(tmp_path: Path, dtype: str, share: float) -> None:
    width = WIDTH[dtype]
    old = random.Random(1).randbytes(3 * BLOCK + 40 * width)
    new = changed(old, share, 2, width)
    base = write(tmp_path / "base", {"m.safetensors": safetensors({"w": (dtype, old)})})
    whole = safetensors({"w": (dtype, new)})
    fresh = write(tmp_path / "new", {"m.safetensors": whole})
    out = tmp_path / "delta"
    result = encode(base, fresh, out, ["m.safetensors"], limit_bytes=1 << 30)
    assert result.size_bytes == out.stat().st_size
    assert result.changed_words == sum(
        old[i : i + width] != new[i : i + width] for i in range(0, len(old), width)
    )
    right = made(base, tmp_path / "target", [out], "m.safetensors", whole)
    assert len(right) == 4
    assert (tmp_path / "target/m.safetensors").read_bytes() == whole
    if share == 0.01 and width == 2:
        assert result.size_bytes < len(whole) / 50


def test_mixed_types_shards_and_a_chain(tmp_path: Path) -> None:
    """Two shards, one of mixed types; three steps, applied in one go from the first."""
    rng = random.Random(3)
    values = {"a": ("BF16", rng.randbytes(BLOCK)), "norm": ("F32", rng.randbytes(4000))}
    steps = []
    for step in range(4):
        if step:
            values = {n: (t, changed(raw, 0.02, step)) for n, (t, raw) in values.items()}
        files = {
            "x-1.safetensors": safetensors(values, note=f"step {step}"),
            "x-2.safetensors": safetensors({"b": ("BF16", changed(bytes(9000), 0.1, step))}),
            "config.json": b"{}",
        }
        steps.append(write(tmp_path / str(step), files))
    deltas = []
    for step in range(1, 4):
        out = tmp_path / f"delta-{step}"
        assert encode(
            steps[step - 1], steps[step], out, sorted(files), limit_bytes=1 << 30
        ).size_bytes
        deltas.append(out)
    for name in ("x-1.safetensors", "x-2.safetensors"):
        data = (steps[3] / name).read_bytes()
        assert len(made(steps[0], tmp_path / "t", deltas, name, data)) == -(-len(data) // BLOCK)
        assert (tmp_path / "t" / name).read_bytes() == data
    assert made(steps[0], tmp_path / "t", deltas, "config.json", b"{}") == []


def test_what_cannot_be_compared_is_left_out(tmp_path: Path) -> None:
    same = safetensors({"w": ("BF16", bytes(1000))})
    base = write(
        tmp_path / "base",
        {"reshaped": same, "same": same, "gone": same, "odd": b"\xff" * 40, "short": b"12"},
    )
    new = write(
        tmp_path / "new",
        {
            "reshaped": safetensors({"v": ("BF16", bytes(1000))}),
            "same": safetensors({"w": ("BF16", b"\1" * 1000)}),
            "added": same,
            "odd": b"\xff" * 40,
            "short": b"12",
        },
    )
    names = ["reshaped", "same", "gone", "added", "odd", "short"]
    assert encode(base, new, tmp_path / "d", names, limit_bytes=1 << 20).size_bytes
    with (tmp_path / "d").open("rb") as file:
        assert list(Delta(file).files) == ["same"]
    nothing = encode(base, new, tmp_path / "e", ["gone", "odd"], limit_bytes=1 << 20)
    assert nothing.size_bytes == 0 and not (tmp_path / "e").exists()


def test_a_file_without_tensors_does_not_keep_the_others_from_a_delta(tmp_path: Path) -> None:
    raw = random.Random(1).randbytes(1 << 16)
    none = (8).to_bytes(8, "little") + b"{}" + b" " * 6
    base = write(tmp_path / "base", {"a": none, "b": safetensors({"w": ("BF16", raw)})})
    assert word_bytes_of(base / "a") == 8
    new = safetensors({"w": ("BF16", changed(raw, 0.01, 1))})
    write(tmp_path / "new", {"a": none, "b": new})
    out = tmp_path / "delta"
    encode(base, tmp_path / "new", out, ["a", "b"], limit_bytes=1 << 16)
    assert made(base, tmp_path / "target", [out], "b", new) == [0]
    assert made(base, tmp_path / "target", [out], "a", none) == [0]


def test_words_never_span_two_tensors(tmp_path: Path) -> None:
    files = {
        "bf16": safetensors({"a": ("BF16", bytes(6))}),
        "f32": safetensors({"a": ("F32", bytes(8))}),
        "mixed": safetensors({"a": ("F32", bytes(8)), "b": ("BF16", bytes(4))}),
        "fp8": safetensors({"a": ("F8_E4M3", bytes(16)), "b": ("F32", bytes(8))}),
        "none": b"GGUF" + bytes(100),
    }
    write(tmp_path, files)
    assert [word_bytes_of(tmp_path / name) for name in files] == [2, 4, 2, 1, 0]


def test_a_delta_that_does_not_pay_is_given_up(tmp_path: Path) -> None:
    rng = random.Random(5)
    base = write(tmp_path / "a", {"m": safetensors({"w": ("F32", rng.randbytes(2 * BLOCK))})})
    new = write(tmp_path / "b", {"m": safetensors({"w": ("F32", rng.randbytes(2 * BLOCK))})})
    result = encode(base, new, tmp_path / "d", ["m"], limit_bytes=BLOCK)
    assert result.size_bytes == 0 and not (tmp_path / "d").exists()


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _flip(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize(
    ("damage", "refused"),
    [
        (_cut, True),
        (_flip, False),
        (lambda data: b"", True),
        (lambda data: b"GIF89a" + data, True),
        (lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:], True),
        (lambda data: data.replace(b"m.s", b"m.\xff", 1), True),
    ],
)
def test_a_damaged_delta_writes_nothing_wrong(
    tmp_path: Path, damage: Callable[[bytes], bytes], refused: bool
) -> None:
    old = random.Random(1).randbytes(BLOCK + 100)
    data = safetensors({"w": ("BF16", changed(old, 0.01, 1))})
    base = write(tmp_path / "base", {"m.s": safetensors({"w": ("BF16", old)})})
    new = write(tmp_path / "new", {"m.s": data})
    out = tmp_path / "delta"
    encode(base, new, out, ["m.s"], limit_bytes=1 << 20)
    out.write_bytes(damage(out.read_bytes()))
    if refused:
        with pytest.raises(BadDelta):
            made(base, tmp_path / "t", [out], "m.s", data)
        return
    try:
        right = made(base, tmp_path / "t", [out], "m.s", data)
    except BadDelta:
        right = []
    there = (tmp_path / "t/m.s").read_bytes()
    for index, at in enumerate(range(0, len(data), BLOCK)):
        expected = data if index in right else bytes(len(data))
        assert there[at : at + BLOCK] == expected[at : at + BLOCK]
    assert len(right) < 2


def test_a_delta_on_another_base_makes_nothing(tmp_path: Path) -> None:
    """The chain skips a step: no piece comes out right, so nothing is written."""
    raw = random.Random(1).randbytes(BLOCK)
    steps = []
    for step in range(3):
        raw = changed(raw, 0.05, step)
        data = safetensors({"w": ("BF16", raw)})
        steps.append(write(tmp_path / str(step), {"m": data}))
    encode(steps[1], steps[2], tmp_path / "d", ["m"], limit_bytes=1 << 20)
    assert made(steps[0], tmp_path / "t", [tmp_path / "d"], "m", data) == []
    assert not any((tmp_path / "t/m").read_bytes())


def test_the_service_encodes_and_applies(tmp_path: Path) -> None:
    old = safetensors({"w": ("BF16", bytes(1000))})
    new = safetensors({"w": ("BF16", b"\1\0" * 500)})
    write(tmp_path / "a", {"m": old})
    write(tmp_path / "b", {"m": new})
    write(tmp_path / "c", {"m": bytes(len(new))})
    base, fresh, target, delta = (str(tmp_path / name) for name in "abcd")
    service = DeltaService()
    wanted = EncodeDelta(base=base, new=fresh, out=delta, names=["m"], limit_bytes=1 << 20)
    assert trio.run(service.encode, wanted).changed_words == 500
    piece = PieceToMake(0, "m", 0, len(new), _hash(new))
    order = MakePieces(base=base, target=target, deltas=[delta], pieces=[piece])
    assert trio.run(service.make, order).made == [0]
    assert (tmp_path / "c/m").read_bytes() == new
