"""Slots and memory of the native engine: refills, bounds, out of memory, broken weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from peers.engines import native, sampling
from peers.engines.batch import generate
from peers.engines.cache import Bucket
from peers.engines.engine import Piece, Request
from peers.engines.model import read_weights
from peers.engines.native import NativeEngine
from swarm.errors import UserError
from tests.engines.conformance import PROMPTS, drain, requests

Policies = Callable[[str], list[Path]]


@pytest.fixture
def folder(policies: Policies) -> Path:
    return policies("qwen2-tied")[0]


def endless(count: int, limit: int = 20) -> list[Request]:
    """Requests without stop ids."""
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(count)]
    return [replace(each, stop_ids=()) for each in requests(prompts, limit)]


def test_a_free_slot_is_refilled_before_the_next_step(folder: Path) -> None:
    engine = NativeEngine(folder, slots=2)
    asked = [
        replace(each, limit=limit) for each, limit in zip(endless(5), [3, 8, 3, 2, 1], strict=True)
    ]
    for request in asked:
        engine.submit(request)
    ends: dict[int, int] = {}
    for step in range(1, 20):
        ends |= {piece.id: step for piece in engine.step()}
    # Slot 1: three steps, three, two. Slot 2: eight, one.
    assert ends == {0: 3, 2: 6, 3: 8, 1: 8, 4: 9}


def test_memory_stays_within_its_bound(folder: Path) -> None:
    engine = NativeEngine(folder)
    cache = engine._rows.cache
    cache.bytes_max = 3 * cache.row_bytes(64)
    asked = [replace(each, keep=index % 2 == 0) for index, each in enumerate(endless(12, 30))]
    for request in asked:
        engine.submit(request)
    found: dict[int, Piece] = {}
    while len(found) < len(asked):
        found |= {piece.id: piece for piece in engine.step()}
        assert cache.bytes <= cache.bytes_max
    plain = generate(NativeEngine(folder), asked)
    assert [found[each.id].tokens for each in asked] == [piece.tokens for piece in plain]
    cache.bytes_max = cache.row_bytes(64) - 1
    with pytest.raises(ValueError, match=r"needs .* GB of cache"):
        engine.submit(replace(asked[0], id=99))


def test_a_row_that_outgrows_its_bucket_moves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = endless(9, 40)
    plain = generate(NativeEngine(folder), asked)
    monkeypatch.setattr("peers.engines.cache.COLUMNS_MIN", 4)
    for bytes_max in (1 << 30, 9 * NativeEngine(folder)._rows.cache.row_bytes(64)):
        engine = NativeEngine(folder)
        engine._rows.cache.bytes_max = bytes_max
        made = generate(engine, asked)
        assert [piece.tokens for piece in made] == [piece.tokens for piece in plain]
        columns = [bucket.columns for bucket in engine._rows.cache.buckets]
        assert columns == sorted(columns) and {4, 8, 16, 32} <= set(columns)
        torch.testing.assert_close(made[0].hidden, plain[0].hidden, rtol=0.02, atol=1e-2)


def test_out_of_memory_halves_the_batch_and_goes_on(folder: Path) -> None:
    """A device with room for four rows: no token is lost, and all rows finish."""
    engine = NativeEngine(folder)
    forward = engine._decoder.forward
    asked = endless(12, 9)

    def short(tokens: Any, *others: Any) -> Any:
        if engine.out_of_memory < 2 and len(engine._rows.live) > 4:
            raise torch.OutOfMemoryError("no room")
        return forward(tokens, *others)

    for request in asked[:6]:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    setattr(engine._decoder, "forward", short)  # noqa: B010 (its type is narrower)
    for request in asked[6:]:
        engine.submit(request)
    found = drain(engine)
    assert engine.out_of_memory == 2 and engine.capabilities.slots == 3
    plain = generate(NativeEngine(folder), asked)
    assert [found[each.id].tokens for each in asked] == [piece.tokens for piece in plain]


def test_no_memory_for_one_row_is_a_sentence(folder: Path) -> None:
    engine = NativeEngine(folder)

    def short(*_: Any) -> Any:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    setattr(engine._decoder, "forward", short)  # noqa: B010 (its type is narrower)
    with pytest.raises(UserError, match="no memory for a completion of 12 positions"):
        generate(engine, endless(4, 9))
    assert not engine._rows.live


@pytest.mark.parametrize("capacity", [0, 3])
def test_a_device_smaller_than_the_cache_s_bound(
    capacity: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs took memory since the bound was set: fewer rows, or a sentence for none."""
    allocate = Bucket._allocate

    def short(self: Bucket[Any], rows: int) -> Any:
        if rows > capacity:
            raise torch.OutOfMemoryError("no room")
        return allocate(self, rows)

    engine = NativeEngine(folder)
    asked = endless(12, 9)
    plain = generate(NativeEngine(folder), asked)
    monkeypatch.setattr(Bucket, "_allocate", short)
    if capacity:
        assert [each.tokens for each in generate(engine, asked)] == [each.tokens for each in plain]
    else:
        with pytest.raises(UserError, match="no memory for a completion of 12 positions"):
            generate(engine, asked)
        assert not engine._rows.live


def test_broken_weights_are_named_by_policy_and_row(folder: Path, tmp_path: Path) -> None:
    weights = read_weights(folder)
    weights["model.norm.weight"][3] = torch.nan
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((folder / "config.json").read_bytes())
    safetensors.torch.save_file(weights, broken / "model.safetensors")
    engine = NativeEngine(folder)
    asked = [replace(each, row=40 + each.row) for each in endless(3)]
    plain = generate(engine, asked)
    engine.load_weights(broken, 7)
    with pytest.raises(UserError, match=r"policy 7 .* not numbers \(row 4\d, position 0\)"):
        generate(engine, asked)
    engine.load_weights(folder, 8)
    assert [piece.tokens for piece in generate(engine, asked)] == [each.tokens for each in plain]


def test_sampling_a_large_vocabulary_takes_memory_for_a_bounded_number_of_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, though never more than three rows' logits exist at once."""
    expected = generate(NativeEngine(folder, slots=8), endless(8))
    monkeypatch.setattr(native, "ENTRIES_MAX", 3 * 50)
    monkeypatch.setattr(sampling, "ENTRIES_MAX", 2 * 50)
    monkeypatch.setattr(sampling, "VOCABULARY_MAX", 0)
    engine = NativeEngine(folder, slots=8)
    logits, largest = engine.logits, 0

    def counting(states: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(states))
        return logits(states)

    monkeypatch.setattr(engine, "logits", counting)
    found = generate(engine, endless(8))
    assert [piece.tokens for piece in found] == [piece.tokens for piece in expected]
    assert largest == 3


def test_a_cancelled_turn_releases_the_cache_that_it_would_have_continued(folder: Path) -> None:
    engine = NativeEngine(folder, slots=1)
    first, other = requests(limit=9)[:2]
    engine.submit(replace(first, stop_ids=(), limit=2, keep=True))
    engine.submit(replace(other, stop_ids=()))
    (piece,) = [*engine.step(), *engine.step()]
    assert piece.id == first.id and first.id in engine._rows
    tokens = [*first.tokens, *piece.tokens, 1]
    engine.submit(replace(first, id=9, tokens=tokens, start=2, continues=first.id))
    engine.cancel(9)  # it waits: the other row has the only slot
    engine.cancel(other.id)
    assert first.id not in engine._rows and engine._rows.cache.copies_bytes == 0
