"""Prompts that the seed does not give: easier or longer ones, groups in another order or twice, or
a sample left out.

Caught by `prompts` or `counts`, proven faults: the validator draws the prompts itself.

Cost: the swarm reads one file; the cheat's identity.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.rollouts.rollouts import Rollouts, Row
from tests.attacks.models import Arena, row_of


def easier(rows: list[Row]) -> list[Row]:
    return [
        row_of(row, prompt=[*row.rollout.tokens[:1], *[4] * 6, row.rollout.tokens[7]])
        for row in rows
    ]


def longer(rows: list[Row]) -> list[Row]:
    return [row_of(rows[0], prompt=[1, *rows[0].rollout.tokens[:8]]), *rows[1:]]


def other_order(rows: list[Row]) -> list[Row]:
    size = 8
    first, second = rows[:size], rows[size : 2 * size]
    swapped = [row_of(row, group=0) for row in second] + [row_of(row, group=1) for row in first]
    return [*swapped, *rows[2 * size :]]


def twice(rows: list[Row]) -> list[Row]:
    return [*rows[:8], *(row_of(row, group=0) for row in rows[8:16]), *rows[16:]]


def left_out(rows: list[Row]) -> list[Row]:
    return rows[:-1]


@pytest.mark.parametrize(
    "change, check",
    [
        (easier, "prompts"),
        (longer, "prompts"),
        (other_order, "prompts"),
        (twice, "counts"),
        (left_out, "counts"),
    ],
)
def test_other_prompts_are_a_proven_fault(
    arena: Arena, change: Callable[[list[Row]], list[Row]], check: str
) -> None:
    order = arena.order(0)
    _, rollouts = arena.honest_file(order)
    arena.proves_fault(check, Rollouts.from_rows(change(arena.rows(rollouts))), order)
