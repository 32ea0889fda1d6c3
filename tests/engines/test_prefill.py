"""The native engine's prefill: rows in one batch equal each row alone; memory that runs short."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.engines.engine import Prefill
from peers.engines.native import NativeEngine
from swarm.errors import UserError
from tests.engines.families import SUPPORTED, save_random


def episodes() -> tuple[list[list[int]], list[list[int]]]:
    """Groups on shared prompts, rows of their own and equal ones, a rollout of two turns.

    Returns the sequences, shuffled, and the indices of their sampled tokens.
    """
    drawn = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(50) for _ in range(count)]

    sequences: list[tuple[list[int], list[int]]] = []
    for prompt, lengths in ((tokens(6), (1, 3, 3, 20)), (tokens(1), (9, 30)), (tokens(6), (2, 2))):
        for length in lengths:
            whole = [*prompt, *tokens(length)]
            sequences.append((whole, list(range(len(prompt), len(whole)))))
    for prompt_length, length in ((4, 11), (9, 6), (2, 13)):
        whole = tokens(prompt_length + length)
        sequences.append((whole, list(range(prompt_length, len(whole)))))
    sequences.append((tokens(12), [3, 4, 9, 10, 11]))
    again, _ = sequences[-1]
    sequences += [sequences[0], sequences[8], (again, [10, 11])]  # equal rows; other turns
    drawn.shuffle(sequences)
    return [each for each, _ in sequences], [indices for _, indices in sequences]


def fp64_engine(folder: Path) -> NativeEngine:
    return NativeEngine(folder, dtype=torch.float64)


def one_by_one(
    engine: NativeEngine, sequences: list[list[int]], sampled: list[list[int]]
) -> Prefill:
    each = [engine.prefill([row], [at]) for row, at in zip(sequences, sampled, strict=True)]
    return Prefill(
        [one.hidden[0] for one in each],
        [one.states[0] for one in each],
        [one.prompt_hidden[0] for one in each],
    )


def assert_equal(found: Prefill, expected: Prefill) -> None:
    for mine, alone in zip(found.states, expected.states, strict=True):
        assert mine.shape == alone.shape
        torch.testing.assert_close(mine, alone, atol=1e-6, rtol=1e-6)
    for mine, alone in zip(found.prompt_hidden, expected.prompt_hidden, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, alone, atol=1e-3, rtol=0.01)


@pytest.mark.parametrize("name", ["qwen2", "mistral-window", "qwen2-window", "qwen3-moe"])
def test_a_batch_equals_each_row_alone(name: str, tmp_path: Path) -> None:
    """No row sees another's tokens, within windows and beyond."""
    save_random(SUPPORTED[name], tmp_path, seed=3)
    engine = fp64_engine(tmp_path)
    sequences, sampled = episodes()
    expected = one_by_one(engine, sequences, sampled)
    for tokens_max in (1 << 14, 40, 7):
        engine._prefiller.tokens_max = tokens_max
        assert_equal(engine.prefill(sequences, sampled), expected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_random(SUPPORTED["qwen2"], tmp_path, seed=3)
    return tmp_path


def test_a_shared_prompt_is_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NativeEngine(folder)
    fed: list[int] = []
    forward = engine._decoder.forward

    def counting(tokens: Any, *rest: Any) -> Any:
        fed.append(tokens.numel())
        return forward(tokens, *rest)

    monkeypatch.setattr(engine._decoder, "forward", counting)
    prompt = [3, 1, 4, 1, 5]
    sequences = [[*prompt, 9, length, *[7] * length] for length in range(4)]
    engine.prefill(sequences, [range(5, len(each)) for each in sequences])
    assert fed == [5 + sum(1 + length for length in range(4))]


class _Small:
    """A device that holds at most `tokens` tokens in one pass."""

    def __init__(self, engine: NativeEngine, tokens: int) -> None:
        self._forward, self._tokens = engine._decoder.forward, tokens
        self.passes: list[int] = []

    def __call__(self, tokens: Any, *rest: Any) -> Any:
        self.passes.append(tokens.numel())
        if tokens.numel() > self._tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._forward(tokens, *rest)


def test_a_batch_too_large_for_memory_is_halved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fp64_engine(folder)
    sequences, sampled = episodes()
    expected = one_by_one(engine, sequences, sampled)
    small = _Small(engine, 45)
    monkeypatch.setattr(engine._decoder, "forward", small)
    assert_equal(engine.prefill(sequences, sampled), expected)
    assert small.passes[0] > 45, "the test's batch fits at once"
    assert max(small.passes[3:]) <= 45


def test_a_sequence_too_large_for_memory_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(folder)
    monkeypatch.setattr(engine._decoder, "forward", _Small(engine, 3))
    with pytest.raises(UserError, match="has no memory to prefill 4 tokens at once; use a device"):
        engine.prefill([[1, 2], [1, 2, 3, 4, 5]], [[1], [1, 2, 3, 4]])


def test_other_errors_are_not_taken_for_lack_of_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(folder)

    def broken(*_: Any) -> Any:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(engine._decoder, "forward", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        engine.prefill([[1, 2]], [[1]])
