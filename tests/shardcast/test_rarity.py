"""Counting who has what, a bit a piece."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarm.shardcast.rarity import Rarity, bits_of, draw

SETS = st.lists(st.integers(0, 2**70 - 1), max_size=12)


@given(SETS, st.data(), st.integers(1, 2**70 - 1))
def test_the_rarest_are_those_with_the_lowest_count(
    neighbours: list[int], data: st.DataObject, pieces: int
) -> None:
    rarity = Rarity()
    for held in neighbours:
        rarity.add(held)
    stay = data.draw(st.integers(0, len(neighbours)))
    for held in neighbours[stay:]:
        rarity.remove(held)
    counts = Counter({i: sum(held >> i & 1 for held in neighbours[:stay]) for i in range(70)})
    wanted = [index for index in range(70) if pieces >> index & 1]
    least = min(counts[index] for index in wanted)
    rarest = {index for index in wanted if counts[index] == least}
    assert {index for index in range(70) if rarity.rarest(pieces) >> index & 1} == rarest
    assert rarity.empty() == (not any(counts.values()))


@given(st.integers(1, 2**200 - 1), st.integers())
def test_what_is_drawn_is_one_of_them(pieces: int, seed: int) -> None:
    assert pieces >> draw(pieces, random.Random(seed)) & 1


def test_every_piece_may_be_drawn() -> None:
    chance = random.Random(1)
    assert {draw(0b1000_0101, chance) for _ in range(200)} == {0, 2, 7}


@given(st.lists(st.integers(0, 1), max_size=100))
def test_one_byte_a_piece_becomes_one_bit(there: list[int]) -> None:
    assert bits_of(bytes(there)) == sum(bit << index for index, bit in enumerate(there))
