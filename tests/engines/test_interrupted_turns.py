"""Episodes of several turns on the native engine: what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from peers.engines.native import NativeEngine
from tests.engines.conformance import requests

Policies = Callable[[str], list[Path]]


def test_a_cancelled_turn_releases_the_cache_that_it_would_have_continued(
    policies: Policies,
) -> None:
    engine = NativeEngine(policies("qwen2-tied")[0], slots=1)
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
