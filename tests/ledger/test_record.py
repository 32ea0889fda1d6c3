"""The share to recompute follows the loss that a lie could cause; the fine follows the share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.ledger.record import Rules, Work, fine, share_to_recompute
from swarm.wire.manifest import Thresholds
from swarm.wire.messages import Evidence
from tests.ledger.test_state import judged

THRESHOLDS = Thresholds()
TOKENS = st.integers(1, 10**7)
STAKES = st.integers(0, 10**9)


def test_a_newcomer_and_a_large_submission_are_recomputed() -> None:
    assert share_to_recompute(1000, 0, THRESHOLDS) == 1.0
    assert share_to_recompute(1000, 99_000, THRESHOLDS) == THRESHOLDS.recompute_share_min
    assert share_to_recompute(1000, 9_000, THRESHOLDS) == pytest.approx(0.3)
    assert share_to_recompute(50_000, 9_000, THRESHOLDS) == 1.0
    assert share_to_recompute(0, 0, THRESHOLDS) == THRESHOLDS.recompute_share_min, "nothing to gain"


@given(TOKENS, STAKES)
def test_no_lie_pays(tokens: int, stake: int) -> None:
    """What a fake earns, less what its refusal costs, whether or not that evicts."""
    share = share_to_recompute(tokens, stake, THRESHOLDS)
    safety = THRESHOLDS.recompute_safety
    cost = fine(judged(0, "refused", tokens=tokens, share=share), safety)
    gain = (1 - share) * tokens - share * min(cost, stake)
    if share < 1:
        assert cost <= stake + 1, "the stake covers the fine"
        assert gain == pytest.approx(-(safety - 1) * tokens, abs=1.0)
    else:
        assert gain <= 0


@given(TOKENS, STAKES)
def test_few_fakes_pass_before_one_is_refused(tokens: int, stake: int) -> None:
    share = share_to_recompute(tokens, stake, THRESHOLDS)
    passed = (1 / share - 1) * tokens
    assert passed <= stake / THRESHOLDS.recompute_safety + 1e-6 * tokens


@given(st.lists(st.tuples(st.integers(0, 40), TOKENS), max_size=20), st.data())
def test_a_fine_voids_what_it_costs_and_nothing_final(
    work: list[tuple[int, int]], data: st.DataObject
) -> None:
    rules = Rules(stake_steps=10, hold_steps=15, safety=3.0, observes=False)
    credited = {
        number.to_bytes(32, "big"): judged(
            number, step=step, tokens=tokens, evidence=Evidence(tokens=tokens)
        )
        for number, (step, tokens) in enumerate(work)
    }
    step = data.draw(st.integers(25, 40))
    stake = Work(credited, frozenset(credited), ()).stake(step, rules)
    tokens = data.draw(TOKENS)
    share = share_to_recompute(tokens, stake, THRESHOLDS)
    refused = judged(99, "refused", step=step, tokens=tokens, share=share)
    after = Work(credited, frozenset(credited), (refused,))
    standings = after.standings(40, None, rules)
    voided = sum(credited[name].tokens for name, word in standings.items() if word == "void")
    in_window = sum(tokens for at, tokens in work if step - 10 < at <= step)
    assert voided >= min(fine(refused, 3.0), in_window)
    assert all(
        credited[name].step > step - 10 for name, word in standings.items() if word == "void"
    )
    assert after.stake(step, rules) == max(0, stake - fine(refused, 3.0))


def test_what_a_cheap_record_can_be_cashed_in_for() -> None:
    """Many small honest submissions do not lower the share of a large one."""
    stake = 8 * 50
    assert share_to_recompute(50, stake, THRESHOLDS) < 0.35
    assert share_to_recompute(200, stake, THRESHOLDS) == 1.0
