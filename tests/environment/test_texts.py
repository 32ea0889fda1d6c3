"""The tokens that an environment peer remembers between the turns of an episode."""

from __future__ import annotations

from peers.environment.memory import Texts
from swarm.wire.turns import Turn, pack


def turn(sample: int, *tokens: int) -> Turn:
    return Turn(
        seed=bytes(32), group=0, sample=sample, index=1, before=bytes(32), tokens=pack(tokens)
    )


def test_the_least_recent_episodes_are_forgotten() -> None:
    texts = Texts(bytes_max=3 * 8)
    for sample in range(3):
        texts.keep(turn(sample, 7), pack([1, 2, 3]))
    assert texts.beginning(bytes(32), 0, 0, 4) is None
    assert texts.beginning(bytes(32), 0, 1, 4) == pack([1, 2, 3, 7])
    assert texts.beginning(bytes(32), 0, 2, 2) == pack([1, 2])
    assert texts.beginning(bytes(32), 0, 2, 5) is None, "more than is known"
    texts.keep(turn(2), pack([1, 2, 3, 7]))
    assert texts.beginning(bytes(32), 0, 2, 1) is None, "the episode is over"
    assert texts.beginning(bytes(32), 0, 2, 0) == b""
