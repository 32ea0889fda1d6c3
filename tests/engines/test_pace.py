"""The number of rows generated at once follows their measured speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from peers.engines import native
from peers.engines.batch import generate
from peers.engines.native import NativeEngine
from peers.engines.pace import WINDOW, Pace
from tests.engines.test_slots import endless

Policies = Callable[[str], list[Path]]


@pytest.mark.parametrize(("full", "expected"), [(1.5, 8), (2.5, 4)])
def test_the_number_with_more_tokens_per_second_is_kept(full: float, expected: int) -> None:
    """Steps with all slots take 1.5 or 2.5 times as long as with half."""
    pace = Pace(8)
    for _ in range(3 * WINDOW):
        pace.note(3, 100.0)  # not full
        pace.note(pace.slots, 1.0 if pace.slots == 4 else full)
    assert pace.slots == expected
    pace.note(pace.slots, 1e9)
    assert pace.slots == expected


def test_an_engine_measures_and_gives_the_same_tokens(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "SLOTS", 4)
    (folder, *_) = policies("qwen2-tied")
    engine, fixed = NativeEngine(folder), NativeEngine(folder, slots=4)
    assert (engine._pace.slots, fixed._pace.slots) == (2, 4)
    now = 0.0

    def clock() -> float:  # a step takes the cube of its rows
        nonlocal now
        now += len(engine._rows.live) ** 3
        return now

    engine._pace.clock = clock
    asked = endless(10, 40)
    made = generate(engine, asked)
    assert [each.tokens for each in made] == [each.tokens for each in generate(fixed, asked)]
    assert engine._pace.slots == 2 and len(engine._pace._speeds) == 2
    assert engine.capabilities.slots == fixed.capabilities.slots == 4
