"""Records that are refused, and the branch that every trainer follows."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.outer.chain import RECORDS_MAX, BadRecord, Chain, lost
from swarm.wire.envelope import Envelope
from swarm.wire.outer import GENESIS, Contribution, RoundRecord
from tests.outer.records import RUN, TRAINERS, contribution, record

STALENESS_MAX = 1


def chain_of(*records: Envelope) -> Chain:
    chain = Chain(STALENESS_MAX)
    for each in records:
        chain.add(each)
    return chain


FIRST = record([contribution(0), contribution(1)])
SECOND = record([contribution(0, FIRST.digest, 1)], FIRST)
OTHER = record([contribution(2)])
TWICE = contribution(0)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (record([contribution(2, tokens=5)], FIRST, tokens=7), "its chain has 25"),
        (record([contribution(2)], FIRST, round=3), "its parent leads to 2"),
        (record([contribution(2)], SECOND), "too late: its base is 2 rounds old"),
        (record([contribution(2, OTHER.digest, 1)], FIRST), "another base than round 1"),
        (record([contribution(2, SECOND.digest, 2)], FIRST), "round 2, which this chain lacks"),
        (record([contribution(1, name="again")], FIRST), "round 1 counted it already"),
        (record([TWICE, TWICE], FIRST), "lists a trainer twice"),
        (record([contribution(2)], round=2), "a parent of another round"),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused_in_a_sentence(bad: Envelope, why: str) -> None:
    chain = chain_of(FIRST, SECOND, OTHER)
    with pytest.raises(BadRecord, match=why):
        chain.add(bad)
    assert bad.digest not in chain


def test_a_late_contribution_counts_within_the_bound() -> None:
    chain = chain_of(FIRST, record([contribution(2), contribution(0, FIRST.digest, 1)], FIRST))
    assert chain.round_of(chain.best()) == 2


def test_a_record_waits_for_its_parent() -> None:
    chain = Chain(STALENESS_MAX)
    assert chain.add(SECOND) == []
    assert (chain.best(), FIRST.digest in chain) == (GENESIS, False)
    assert [link.digest for link in chain.add(FIRST)] == [FIRST.digest, SECOND.digest]
    assert (chain.best(), FIRST.digest in chain) == (SECOND.digest, True)


def test_a_trainer_with_a_later_state_needs_no_ancestors() -> None:
    third = record([contribution(1, FIRST.digest, 1)], SECOND)
    chain = Chain(STALENESS_MAX)
    chain.begin_at(SECOND)
    chain.add(third)
    assert chain.best() == third.digest
    assert chain.path(FIRST.digest, third.digest) is not None  # the record itself is unknown
    assert chain.path(GENESIS, third.digest) is None


def chain_long(rounds: int) -> list[Envelope]:
    """Records that follow each other."""
    records = [FIRST]
    for number in range(1, rounds):
        last = records[-1]
        records.append(record([contribution(0, last.digest, number)], last))
    return records


def test_a_long_chain_may_arrive_backwards_and_its_beginning_is_forgotten() -> None:
    records = chain_long(700)
    chain = chain_of(*records[:0:-1])
    assert chain.best() == GENESIS
    assert [link.round for link in chain.add(records[0])] == list(range(1, 701))
    chain.forget_before(600)
    assert (records[598].digest in chain, records[599].digest in chain) == (False, True)
    assert chain.best() == records[-1].digest
    assert chain.path(records[650].digest, chain.best()) is not None
    assert chain.fork(records[-1].digest, records[598].digest) is None
    later = record([contribution(1, records[-1].digest, 700)], records[-1])
    assert [link.round for link in chain.add(later)] == [701]


def test_records_that_a_removed_trainer_signed_last_do_not_count() -> None:
    heavy = record([contribution(number) for number in range(3)], signer=4)
    chain = chain_of(FIRST, heavy)
    assert chain.best() == heavy.digest
    assert chain.best(lambda link: link.signer != TRAINERS[4].peer_id) == FIRST.digest
    kept = record([contribution(0, heavy.digest, 1)], heavy)
    chain.add(kept)  # a present trainer has built on it
    assert chain.best(lambda link: link.signer != TRAINERS[4].peer_id) == kept.digest


def test_what_the_lighter_branch_has_merged_is_lost() -> None:
    heavier = record([contribution(number) for number in (1, 2, 3)])
    chain = chain_of(FIRST, SECOND, heavier)
    assert chain.best() == heavier.digest
    assert [link.round for link in lost(chain, SECOND.digest, heavier.digest)] == [1, 2]
    assert not lost(chain, FIRST.digest, SECOND.digest)


def alone(trainer: int, rounds: int, start: Envelope | None = None) -> list[Envelope]:
    """Rounds that one trainer makes by itself, with claims as high as the wire allows."""
    records: list[Envelope] = []
    for _ in range(rounds):
        parent = records[-1] if records else start
        digest = parent.digest if parent is not None else GENESIS
        number = parent.expect(RoundRecord).round if parent is not None else 0
        mine = contribution(trainer, digest, number, tokens=1 << 44)
        records.append(record([mine], parent, signer=trainer))
    return records


@given(rounds=st.integers(1, 40), late=st.booleans())
def test_no_claim_and_no_number_of_rounds_of_one_trainer_outweighs_two_others(
    rounds: int, late: bool
) -> None:
    bad = alone(4, rounds)
    chain = chain_of(*bad, FIRST) if late else chain_of(FIRST, *bad)
    assert chain.best() == FIRST.digest


def test_the_records_of_one_trainer_are_bounded_and_those_of_others_are_not() -> None:
    chain = chain_of(*alone(4, RECORDS_MAX), FIRST)
    with pytest.raises(BadRecord, match="has signed 1000 records"):
        chain.add(record([contribution(0), contribution(3)], signer=4))
    assert chain.add(SECOND)
    chain.forget_before(500)
    assert chain.add(record([contribution(0)], round=1, signer=4))


def test_a_claim_beyond_what_the_inner_steps_can_train_on_does_not_count() -> None:
    chain = Chain(STALENESS_MAX, contribution_tokens_max=100)
    with pytest.raises(BadRecord, match=r"it claims 101 tokens; the inner steps .* at most 100"):
        chain.add(record([contribution(0), contribution(1, tokens=101)]))
    assert chain.add(record([contribution(0), contribution(1, tokens=100)]))


def test_nobody_makes_up_the_contribution_of_another_trainer() -> None:
    """Or one trainer could let all others contribute what it likes, which also weighs most."""
    made_up = contribution(0).signed(TRAINERS[4], RUN)
    raised = msgspec.structs.replace(contribution(0), tokens=11)
    other_run = contribution(0).signed(TRAINERS[0], "owner/other")
    for bad in (made_up, raised, other_run):
        with pytest.raises(BadRecord, match="has not signed"):
            chain_of(record([bad, contribution(1)], signer=4))
        with pytest.raises(BadRecord, match="has not signed"):
            Chain(STALENESS_MAX).begin_at(record([bad], signer=4))


def test_removing_a_trainer_heals_the_chain() -> None:
    """Its own records weigh nothing from then on, past ones too, and neither do those of others by
    its contributions."""
    three = [contribution(number) for number in (0, 1, 4)]
    bad = record(three, signer=4)
    honest = {identity.peer_id for identity in TRAINERS[:4]}
    chain = chain_of(FIRST, bad)
    assert chain.best() == bad.digest
    chain.trust(honest)
    assert chain.best() == FIRST.digest
    # What honest trainers have built on it counts by what they contributed themselves.
    built = record([contribution(2, bad.digest, 1), contribution(3, bad.digest, 1)], bad)
    more = record([contribution(each, built.digest, 2) for each in (0, 1, 2)], built)
    chain.add(built)
    chain.add(more)
    assert chain.best() == more.digest
    # A contribution of its weighs nothing in a record of another's either.
    other = record([contribution(0), contribution(4)], signer=1)
    assert chain_of(other).best() == other.digest
    two = chain_of(other, FIRST)
    two.trust(honest)
    assert two.best() == FIRST.digest


@st.composite
def trees(draw: st.DrawFn) -> list[Envelope]:
    """Records of several branches, each a valid one or one that breaks a rule."""
    records: list[Envelope] = []
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *records]))
        signer = draw(st.integers(0, 4))
        trainers = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True))
        bases = [(GENESIS, 0)]
        bases += [(each.digest, each.message.round) for each in records]  # type: ignore[attr-defined]
        contributions: list[Contribution] = []
        for trainer in trainers:
            base, base_round = draw(st.sampled_from(bases))
            tokens = draw(st.integers(1, 3))
            name = draw(st.sampled_from(["", str(number)]))
            contributions.append(contribution(trainer, base, base_round, tokens, name))
        records.append(record(contributions, parent, signer=signer))
    return records


@given(records=trees(), data=st.data())
def test_every_order_of_arrival_ends_at_the_same_record(
    records: list[Envelope], data: st.DataObject
) -> None:
    best = set()
    named = {identity.peer_id for identity in TRAINERS[: data.draw(st.integers(1, 5))]}
    for _ in range(2):
        chain = Chain(STALENESS_MAX)
        removed = data.draw(st.integers(0, len(records)))
        for number, each in enumerate(data.draw(st.permutations(records))):
            if number == removed:
                chain.trust(named)
            with suppress(BadRecord):
                chain.add(each)
        chain.trust(named)
        best.add(chain.best())
        counted = set()
        for link in chain.path(GENESIS, chain.best()) or []:
            for part in link.record.contributions:
                assert link.round - 1 - part.base_round in (0, 1)
                assert (part.trainer, part.base) not in counted
                counted.add((part.trainer, part.base))
    assert len(best) == 1
