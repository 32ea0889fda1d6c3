"""Steps over fixed tensors, as CUDA graphs replay them, give the tokens of ordinary steps.

They run here as they are, so only their recording needs a GPU (`tests/engines/test_engine_gpu.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.engines import cache, graphs
from peers.engines.batch import generate
from peers.engines.engine import Piece
from peers.engines.graphs import GRAPHS_MAX, Capture, Graphs, Replay, StaticStep
from peers.engines.native import ENTRIES_MAX, NativeEngine
from tests.engines.conformance import requests

Policies = Callable[[str], list[Path]]

FAMILIES = ("qwen2-tied", "qwen2", "gemma2", "mistral-window")


def run_as_it_is(step: StaticStep) -> Replay:
    """A `Capture` for a CPU."""
    return step


def static(folder: Path, capture: Capture = run_as_it_is, slots: int = 9) -> NativeEngine:
    """An engine that decodes by static steps."""
    engine = NativeEngine(folder, slots=slots)
    engine._graphs = Graphs(engine._decoder, engine._rows.cache, ENTRIES_MAX, capture)
    return engine


def same(plain: list[Piece], pieces: list[Piece]) -> None:
    assert [piece.tokens for piece in pieces] == [piece.tokens for piece in plain]
    for one, other in zip(pieces, plain, strict=True):
        torch.testing.assert_close(
            one.log_probabilities, other.log_probabilities, atol=1e-5, rtol=0
        )
        torch.testing.assert_close(one.hidden, other.hidden, atol=0.02, rtol=0.02)
        assert (one.spans, one.finish) == (other.spans, other.finish)


@pytest.fixture
def short_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of few tokens move to longer buckets."""
    monkeypatch.setattr(cache, "COLUMNS_MIN", 8)


@pytest.mark.usefixtures("short_buckets")
def test_static_steps_give_the_same_tokens(policies: Policies) -> None:
    """Over admissions, ends, cancelled rows, moves to longer buckets, resizes and swaps."""
    replays = 0

    @settings(max_examples=4, deadline=None)
    @given(seed=st.integers(0, 1 << 30), family=st.sampled_from(FAMILIES))
    def compare(seed: int, family: str) -> None:
        nonlocal replays
        replays += run_both(policies(family), random.Random(seed))

    compare()
    assert replays > 10


def run_both(folders: list[Path], chance: random.Random) -> int:
    """Run a plain and a static engine alike; return how often a step was run again."""
    plain, replaying = NativeEngine(folders[0], slots=9), static(folders[0])
    asked = [
        replace(
            each,
            row=chance.randrange(1 << 20),
            tokens=[chance.randrange(4, 40) for _ in range(chance.randrange(1, 30))],
            limit=chance.randrange(1, 25),
            temperature=chance.choice([1.0, 1.0, 0.7]),
            noise_key=chance.choice([(7, 8), (0xFFFFFFFF, 1 << 31), (0, 1), None]),
        )
        for each in requests([[1]] * 14)
    ]
    found: list[dict[int, Piece]] = [{}, {}]
    waiting = list(asked)
    for step in range(50):
        some = [waiting.pop() for _ in range(min(len(waiting), chance.randrange(4)))]
        action = chance.random()
        for engine, pieces in zip((plain, replaying), found, strict=True):
            for request in some:
                engine.submit(request)
            if action < 0.05:
                engine.load_weights(folders[step % 2], step)
            elif action < 0.1:
                engine._rows.free_memory()
            elif action < 0.15 and some:
                engine.cancel(some[0].id)
            pieces |= {piece.id: piece for piece in engine.step()}
    assert found[0].keys() == found[1].keys()
    same(*([pieces[id] for id in sorted(pieces)] for pieces in found))
    return replaying._graphs.replays


def test_steps_outlive_a_swap_and_read_the_new_weights(policies: Policies) -> None:
    for family in FAMILIES[:2]:  # tied and untied heads
        old, new = policies(family)
        engine = static(old)
        asked = [replace(each, stop_ids=()) for each in requests()]
        generate(engine, asked)
        captures = engine._graphs.captures
        assert captures
        engine.load_weights(new, 1)
        same(generate(NativeEngine(new, policy=1), asked), generate(engine, asked))
        assert engine._graphs.captures == captures
        assert {layout.noise for layout in engine._graphs._steps} == {"all"}


def test_steps_over_freed_memory_are_dropped(policies: Policies) -> None:
    engine = static(policies("qwen2")[0])
    asked = [replace(each, stop_ids=()) for each in requests(limit=6)]
    plain = generate(engine, asked)
    before = set(engine._graphs._steps)
    assert before and engine._rows.free_memory()
    same(plain, generate(engine, asked))
    assert not before & set(engine._graphs._steps) and len(engine._graphs._steps) <= GRAPHS_MAX


def test_a_recording_that_fails_is_told_once(
    policies: Policies, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(step: StaticStep) -> Replay:
        raise torch.OutOfMemoryError("no room\nfor it")

    folder = policies("qwen2")[0]
    engine = static(folder, fail)
    asked = requests()
    same(generate(NativeEngine(folder), asked), generate(engine, asked))
    generate(engine, asked)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "decoding goes on without CUDA graphs: one could not be recorded "
        "(OutOfMemoryError: no room)"
    ]


def test_a_mixture_of_experts_has_no_static_step(
    policies: Policies, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = static(policies("qwen3-moe")[0])
    assert not engine._graphs.recording
    assert "without CUDA graphs: a mixture of experts" in capsys.readouterr().err


def test_a_step_in_use_is_not_replaced(policies: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording takes long, so that layouts taking turns would cost more than they save."""
    monkeypatch.setattr(graphs, "GRAPHS_MAX", 1)
    monkeypatch.setattr(graphs, "IDLE_DRAWS", 12)
    folder = policies("qwen2")[0]
    engine = static(folder)
    few, many = requests([[5]], limit=10), requests([[5]] * 4, limit=10)
    asked = [[replace(each, stop_ids=()) for each in some] for some in (many, few, few)]
    captures = []
    for some in asked:
        same(generate(NativeEngine(folder), some), generate(engine, some))
        captures.append(engine._graphs.captures)
    assert captures == [1, 1, 2] and len(engine._graphs._steps) == 1


def test_few_layouts_compute_few_spare_rows(policies: Policies) -> None:
    engine = static(policies("qwen2")[0], slots=64)
    asked = [replace(each, limit=2 + 3 * each.row % 40) for each in requests([[5]] * 64)]
    generate(engine, [replace(each, stop_ids=()) for each in asked])
    layouts = {rows for layout in engine._graphs._steps for _, rows in layout.parts}
    assert layouts <= {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}
