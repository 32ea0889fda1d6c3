"""A submission that several validators recompute is bet on once."""

from __future__ import annotations

from typing import Literal

import pytest

from peers.validator.docket import Docket
from peers.validator.verdicts import bet_once
from swarm.wire.messages import Evidence, Verdict
from tests.validator.test_docket import HERE, key_of, verdict

OWN = Evidence(tokens=100, mismatches=2, sampler=[5], policy=[6], text=[7], selection=[8])
WITHOUT_BETS = Evidence(tokens=100, mismatches=2)


@pytest.mark.parametrize(
    ("word", "recomputed", "expected"),
    [
        ("accepted", 50, WITHOUT_BETS),
        ("accepted", 0, OWN),
        ("refused", 50, OWN),
        ("quarantined", 0, OWN),
    ],
)
def test_evidence_that_another_validator_has_found_is_not_bet_on_again(
    word: Literal["accepted", "refused", "quarantined"], recomputed: int, expected: Evidence
) -> None:
    """Whether the verdict is a first one, a second opinion or an audit."""
    docket = Docket(HERE.peer_id)
    other = verdict(0, by=2, outcome=word, recomputed=recomputed)
    docket.hear(other)
    others: list[Verdict] = list(docket.opinions_on(key_of(other)).values())
    assert bet_once(OWN, "accepted", others) == expected


def test_a_validator_alone_bets() -> None:
    assert bet_once(OWN, "accepted", []) == OWN
