"""Drafts by prompt lookup change how many passes a completion takes, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
        assert (one.tokens, one.finish, one.spans) == (other.tokens, other.finish, other.spans)
        assert torch.allclose(one.log_probabilities, other.log_probabilities, atol=1e-5)
        assert torch.allclose(one.hidden.float(), other.hidden.float(), atol=2e-2)
        assert torch.allclose(one.prompt_hidden.float(), other.prompt_hidden.float(), atol=2e-2)


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
    assert 1 < sum(drafted) < 10
    lookup = Lookup()
    lookup.draft(song, [], DRAFT_MAX)
    lookup.judge(2)
    assert len(lookup.draft(song, [], DRAFT_MAX)) == 3
    lookup.judge(3)
    assert len(lookup.draft(song, [], DRAFT_MAX)) == len(song) - 15  # all that followed
