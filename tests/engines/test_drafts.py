"""Drafts by prompt lookup change how many passes a completion takes, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peers.engines import cache
from peers.engines.drafts import DRAFT_MAX, GRAM, Lookup
from peers.engines.engine import Piece, Request
from peers.engines.native import NativeEngine
from tests.engines.families import SUPPORTED, save_random

SONG = [3, 5, 8, 13, 21] * 4
"""A prompt that repeats itself."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen2")
    save_random(SUPPORTED["qwen2-tied"], made, seed=1)
    return made


def play(engine: NativeEngine, requests: list[Request]) -> tuple[list[Piece], int]:
    """The pieces in the order of the requests, and the passes that they took."""
    for request in requests:
        engine.submit(request)
    made: list[Piece] = []
    passes = 0
    while len(made) < len(requests):
        made += engine.step()
        passes += 1
    return sorted(made, key=lambda piece: piece.id), passes


def asked(temperature: float, key: tuple[int, int] | None) -> list[Request]:
    """Rows with other noise, limits and stops; the second stops at a token of the song."""
    lengths, stops = (40, 40, 7, 1), ((), (21,), (), ())
    return [
        Request(index, SONG[index:], index, key, temperature, stop, limit)
        for index, (limit, stop) in enumerate(zip(lengths, stops, strict=True))
    ]


@pytest.mark.parametrize(("temperature", "key"), [(1.0, None), (0.02, (3, 4)), (1.0, (3, 4))])
def test_drafts_change_no_token_no_state_and_no_log_probability(
    folder: Path, temperature: float, key: tuple[int, int] | None
) -> None:
    engine = NativeEngine(folder)
    engine.pass_max = 0
    plain, slow = play(engine, asked(temperature, key))
    engine.pass_max = 64
    drafted, quick = play(engine, asked(temperature, key))
    assert quick <= slow
    if key is None:  # a random policy ends in a loop, which is drafted
        assert quick < slow * 2 / 3
    for one, other in zip(plain, drafted, strict=True):
        same(one, other)


@settings(max_examples=10, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_right_and_wrong_drafts_change_nothing_in_any_interleaving(
    folder: Path, random: Random
) -> None:
    """Drafts of any length, tiny buckets, rows that wait again, turns, and garbage behind rows."""
    first = [
        Request(
            index,
            [index, *random.choices(range(50), k=random.randint(0, 12))],
            index,
            random.choice([None, (3, 4)]),
            random.choice([0.02, 1.0]),
            tuple(random.sample(range(50), k=random.choice([0, 3]))),
            random.randint(1, 25),
            keep=True,
        )
        for index in range(6)
    ]
    engine = NativeEngine(folder)
    engine.pass_max = 0
    expected, _ = play(engine, first)
    later = {
        request.id: replace(
            request,
            id=request.id + 10,
            tokens=[*request.tokens, *piece.tokens, 9, 4],
            start=len(piece.tokens),
            limit=len(piece.tokens) + random.randint(1, 20),
            continues=request.id,
            keep=False,
        )
        for request, piece in zip(first, expected, strict=True)
    }
    expected += play(engine, list(later.values()))[0]
    asked = [*first, *later.values()]
    truth = {tuple(each.tokens): piece.tokens for each, piece in zip(asked, expected, strict=True)}

    def drafted(_: Lookup, prompt: Sequence[int], sampled: Sequence[int], most: int) -> list[int]:
        right = [*truth[tuple(prompt)][len(sampled) :], *range(DRAFT_MAX)]
        some = right[: random.randint(0, min(most, DRAFT_MAX))]
        return [token if random.random() < 0.8 else random.randrange(50) for token in some]

    found: dict[int, Piece] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lookup, "draft", drafted)
        patch.setattr(cache, "COLUMNS_MIN", 4)
        engine = NativeEngine(folder)
        engine.pass_max = 64
        while len(found) < len(asked):
            if first and random.random() < 0.3:
                engine.submit(first.pop())
            if random.random() < 0.1:
                rows = list(engine._rows.live.values())
                with torch.inference_mode():
                    engine._rows.requeue([row for row in rows if random.random() < 0.5])
            for piece in engine.step():
                found[piece.id] = piece
                if piece.id in later:
                    first.append(later[piece.id])
            spoil_unused_columns(engine)
    for request, piece in zip(asked, expected, strict=True):
        same(piece, found[request.id])


@torch.inference_mode()
def spoil_unused_columns(engine: NativeEngine) -> None:
    """Fill the caches with large numbers behind each row's last token and behind the last row."""
    for bucket in engine._rows.cache.buckets:
        lengths = [row.length for row in bucket.rows]
        lengths += [0] * (bucket.capacity - len(lengths))
        for row, length in enumerate(lengths):
            for each in (*bucket.keys, *bucket.values):
                each[row, :, length:] = 1e4
            bucket.states[row, length:] = 1e4


def same(one: Piece, other: Piece) -> None:
    assert (one.tokens, one.finish, one.spans) == (other.tokens, other.finish, other.spans)
    assert torch.allclose(one.log_probabilities, other.log_probabilities, atol=1e-5)
    assert torch.allclose(one.hidden.float(), other.hidden.float(), atol=2e-2)
    assert torch.allclose(one.prompt_hidden.float(), other.prompt_hidden.float(), atol=2e-2)


def test_logits_that_are_not_numbers_behind_a_draft_are_left_to_the_next_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece never ends with a token sampled from them: without drafts it would be an error."""
    engine = NativeEngine(folder)
    logits = engine.logits

    def broken(states: Tensor) -> Tensor:
        found = logits(states)
        found[1:] = torch.nan  # of the only row's draft
        return found

    asked = [Request(0, SONG, 0, None, 1.0, (), limit) for limit in range(1, 41)]
    plain = [play(engine, [request])[0][0] for request in asked]
    monkeypatch.setattr(engine, "logits", broken)
    for request, expected in zip(asked, plain, strict=True):
        (piece,), _ = play(engine, [request])
        assert piece.tokens == expected.tokens
        assert bool(torch.isfinite(piece.log_probabilities).all())


def test_an_episode_goes_on_after_a_turn_that_was_drafted(folder: Path) -> None:
    def second_turn(pass_max: int) -> Piece:
        engine = NativeEngine(folder)
        engine.pass_max = pass_max
        first = Request(0, SONG, 0, None, 1.0, (), 15, keep=True)
        (piece,), _ = play(engine, [first])
        later = Request(1, [*SONG, *piece.tokens, 9, 4], 0, None, 1.0, (), 35, 15, continues=0)
        return play(engine, [later])[0][0]

    assert second_turn(0).tokens == second_turn(64).tokens


def test_new_weights_in_the_middle_of_drafts_are_as_a_prefill_with_them(
    folder: Path, tmp_path: Path
) -> None:
    save_random(SUPPORTED["qwen2-tied"], tmp_path, seed=2)

    def swapped(pass_max: int) -> Piece:
        engine = NativeEngine(folder)
        engine.pass_max = 0
        engine.submit(Request(0, SONG, 0, None, 1.0, (), 40))
        for _ in range(12):
            engine.step()
        engine.load_weights(tmp_path, 1)
        engine.pass_max = pass_max
        while not (made := engine.step()):
            pass
        return made[0]

    plain, drafted = swapped(0), swapped(64)
    assert plain.tokens == drafted.tokens and plain.spans == drafted.spans


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, DRAFT_MAX + 3))
def test_a_draft_follows_the_same_tokens_where_they_came_before(
    tokens: list[int], most: int
) -> None:
    half = len(tokens) // 2
    lookup = Lookup()
    lookup.draft(tokens[:half], [], most)
    drafted = lookup.draft(tokens[:half], tokens[half:], most)
    assert len(drafted) <= min(most, DRAFT_MAX)
    last = tokens[-GRAM:]
    before = [at for at in range(GRAM, len(tokens)) if tokens[at - GRAM : at] == last]
    if len(tokens) >= GRAM and before:
        assert drafted == tokens[before[-1] :][: len(drafted)] and drafted
    else:
        assert not drafted


def test_wrong_drafts_pause_ever_longer_and_right_ones_grow() -> None:
    lookup, song = Lookup(), [1, 2, 3, 4, 5] * 4
    drafted = []
    for _ in range(100):
        drafted.append(bool(lookup.draft(song, [], DRAFT_MAX)))
        if drafted[-1]:
            lookup.judge(0)
    assert drafted[0] and 1 < sum(drafted) < 10
    lookup = Lookup()
    lengths = []
    for right in (1, 2, 1, 0, 1):
        while not (draft := lookup.draft(song, [], DRAFT_MAX)):
            pass
        lengths.append(len(draft))
        lookup.judge(right)
    assert lengths == [1, 2, 4, 2, 1]
    for _ in range(4):
        lookup.judge(len(draft))
        draft = lookup.draft(song, [], DRAFT_MAX)
    assert len(draft) == len(song) - 15  # all that followed
