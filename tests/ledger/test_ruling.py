"""Which of several verdicts is final, and what shows a validator that judges unlike the others."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from swarm.ledger.ruling import Opinion, binds, contradictions, final, supersedes, tallies


@dataclass(frozen=True)
class Said:
    outcome: str = "accepted"
    proven_fault: bool = False
    recomputed: int = 0


ACCEPTED, RECOMPUTED = Said(), Said(recomputed=100)
REFUSED, LATE = Said("refused", recomputed=100), Said("refused")
FAULT = Said("refused", proven_fault=True)
QUARANTINED = Said("quarantined")
ALL = [ACCEPTED, RECOMPUTED, REFUSED, LATE, FAULT, QUARANTINED]
RANKED = ["a", "b", "c"]

cases = st.dictionaries(st.sampled_from(RANKED), st.sampled_from(ALL), min_size=1)


@given(cases, st.permutations(RANKED), st.booleans())
def test_a_binding_refusal_is_final_unless_the_groups_are_taken(
    opinions: dict[str, Opinion], ranked: list[str], taken: bool
) -> None:
    decided = opinions[final(opinions, ranked, taken=taken)]
    accepted = any(each.outcome == "accepted" for each in opinions.values())
    if taken and accepted:
        assert decided.outcome == "accepted"
    elif any(map(binds, opinions.values())):
        assert binds(decided)
    elif accepted:
        assert decided.outcome == "accepted"


@given(cases, st.permutations(RANKED))
def test_the_outcome_does_not_depend_on_order_or_rank_where_verdicts_settle(
    opinions: dict[str, Opinion], ranked: list[str]
) -> None:
    same = {each: opinions[each] for each in sorted(opinions, reverse=True)}
    assert final(opinions, ranked) == final(same, ranked)
    first, second = opinions[final(opinions, ranked)], opinions[final(opinions, RANKED)]
    assert (first.outcome == "accepted") == (second.outcome == "accepted")


def test_a_later_verdict_counts_only_if_it_recomputes_for_the_first_time() -> None:
    assert supersedes(REFUSED, ACCEPTED)
    assert not supersedes(REFUSED, RECOMPUTED) and not supersedes(ACCEPTED, RECOMPUTED)


def test_only_verdicts_that_both_know_the_content_contradict_each_other() -> None:
    assert contradictions({"a": REFUSED, "b": RECOMPUTED, "c": ACCEPTED}) == [("a", "b")]
    assert contradictions({"a": FAULT, "b": ACCEPTED}) == [("a", "b")]
    assert contradictions({"a": LATE, "b": RECOMPUTED, "c": QUARANTINED}) == []


def test_a_validator_that_accepts_everything_shows_in_the_figures() -> None:
    """It claims to recompute; a twentieth of its acceptances is judged again by the others."""
    lies = [{"a": RECOMPUTED} for _ in range(95)] + [{"a": RECOMPUTED, "b": REFUSED}] * 5
    honest = [{"b": RECOMPUTED}] * 95 + [{"b": RECOMPUTED, "c": RECOMPUTED}] * 5
    figures = tallies([*lies, *honest])
    assert (figures["a"].accepts_alone, figures["a"].shared) == (5, 5)
    assert figures["b"].refuses_alone == 5 and figures["b"].accepts_alone == 0
    assert (figures["c"].refuses_alone, figures["c"].accepts_alone, figures["c"].shared) == (
        0,
        0,
        5,
    )


def test_a_validator_that_refuses_one_worker_shows_in_the_figures() -> None:
    refused = [{"a": REFUSED, "b": RECOMPUTED}, {"a": REFUSED, "c": RECOMPUTED}]
    figures = tallies([*refused, {"a": REFUSED}, {"a": RECOMPUTED, "b": RECOMPUTED}])
    assert (figures["a"].refuses_alone, figures["a"].shared, figures["a"].refused) == (2, 3, 3)
    assert figures["b"].accepts_alone == figures["c"].accepts_alone == 1
