"""What deltas may cost: bytes on the line, and memory of the child that makes and applies them."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from swarm.shardcast import chain as chain_module
from swarm.shardcast.delta import encode, make
from swarm.shardcast.held import delta_key
from tests.memory_network import MemoryNetwork
from tests.shardcast.harness import InPlace, delta_peer
from tests.shardcast.test_chain import fetch, fetched, holds, publish
from tests.shardcast.test_delta import changed, pieces_of, safetensors

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_checkpoints_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "DELTA_CHECKPOINT_BYTES_MIN", 1)


def shards(raws: list[bytes]) -> dict[str, bytes]:
    return {f"m-{i}.safetensors": safetensors({"w": ("BF16", raw)}) for i, raw in enumerate(raws)}


@pytest.mark.wall_clock
async def test_a_chain_of_more_than_half_of_the_full_bytes_is_not_fetched(tmp_path: Path) -> None:
    """Of three deltas each pays, and so do two together."""
    chance = np.random.default_rng(7)
    words = chance.integers(0, 1 << 16, MIB // 4, np.uint16)
    policies = []
    for _ in range(4):
        policies.append(shards([words.tobytes()]))
        hit = chance.random(len(words)) < 0.15
        words[hit] = chance.integers(0, 1 << 16, int(hit.sum()), np.uint16)
    network = MemoryNetwork()
    async with (
        delta_peer(network, 1, tmp_path / "1") as trainer,
        delta_peer(network, 2, tmp_path / "2") as far,
        delta_peer(network, 3, tmp_path / "3") as near,
    ):
        checkpoints = [await publish(trainer, step, policies[step]) for step in range(4)]
        newest = trainer.store.held((0, 3))
        assert newest is not None
        costs = [link.total_bytes for link in newest.manifest.deltas]
        total = newest.manifest.total_bytes
        assert sum(costs[:2]) < 0.48 * total
        assert sum(costs) > 0.52 * total
        await fetch(far, checkpoints[0], trainer)
        await fetch(near, checkpoints[1], trainer)
        for one in (far, near):
            await fetch(one, checkpoints[3], trainer)
        assert [held.key for held in far.store.all() if held.is_delta] == []
        assert fetched(far, 3) >= total
        assert len([held for held in near.store.all() if held.is_delta]) == 2
        assert fetched(near, 3) < 0.1 * total


@pytest.mark.wall_clock
async def test_a_delta_of_more_than_half_of_what_is_missing_is_not_fetched(tmp_path: Path) -> None:
    """One shard of four has new values, the others are copied: the delta saves nothing."""
    rng = random.Random(8)
    first = [rng.randbytes(MIB // 4) for _ in range(4)]
    second = [*first[:3], rng.randbytes(MIB // 4)]
    network = MemoryNetwork()
    async with (
        delta_peer(network, 1, tmp_path / "1") as trainer,
        delta_peer(network, 2, tmp_path / "2") as worker,
    ):
        for step, raws in enumerate([first, second]):
            checkpoint = await publish(trainer, step, shards(raws))
            await fetch(worker, checkpoint, trainer)
        assert trainer.store.held(delta_key((0, 1))) is not None
        assert worker.store.held(delta_key((0, 1))) is None
        assert holds(worker, tmp_path / "2", 1, shards(second))
        assert fetched(worker, 1) < 0.3 * checkpoint.total_bytes


@pytest.mark.wall_clock
async def test_a_child_makes_so_many_bytes_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are served while it makes the next."""
    monkeypatch.setattr(chain_module, "DELTA_BYTES_PER_CALL", MIB)
    raw = random.Random(9).randbytes(3 * MIB)
    network, compute = MemoryNetwork(), InPlace()
    async with (
        delta_peer(network, 1, tmp_path / "1") as trainer,
        delta_peer(network, 2, tmp_path / "2", compute=compute) as worker,
    ):
        for step, values in enumerate([raw, changed(raw, 0.01, 1)]):
            await fetch(worker, await publish(trainer, step, shards([values])), trainer)
        assert compute.calls == ["make"] * 4


@contextmanager
def memory_below(limit_bytes: int) -> Iterator[None]:
    """Memory that Python and numpy take inside the block, above what they had, is below this."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()


def test_neither_encoding_nor_applying_holds_a_file(tmp_path: Path) -> None:
    """Nor the changes of one, though every word is another: a few megabytes for any size."""
    size = 16 * MIB
    values = np.random.default_rng(1).integers(0, 1 << 16, size // 2, np.uint16)
    files = [safetensors({"w": ("BF16", raw.tobytes())}) for raw in (values, values ^ 1)]
    for name, data in zip("ab", files, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m").write_bytes(data)
    base, delta = tmp_path / "a", tmp_path / "d"
    with memory_below(6 * MIB):
        result = encode(base, tmp_path / "b", delta, ["m"], limit_bytes=2 * size)
    assert result.changed_words == size // 2
    pieces = pieces_of(files[1], "m", MIB)
    (tmp_path / "target").mkdir()
    with (tmp_path / "target/m").open("wb") as target:
        target.truncate(len(files[1]))
    with memory_below(6 * MIB):
        assert make(base, tmp_path / "target", [delta], pieces) == list(range(len(pieces)))
    assert (tmp_path / "target/m").read_bytes() == files[1]
