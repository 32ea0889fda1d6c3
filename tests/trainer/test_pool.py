"""The pool of accepted submissions, and the forecast of what will come into it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peers.trainer.filters import GroupLabel
from peers.trainer.forecast import JUDGED_MAX, JUDGED_SECONDS, UNJUDGED_SECONDS, Forecast
from peers.trainer.pool import Accepted, Pool, SubmissionKey
from swarm.wire.messages import Verdict

LABELS: st.SearchStrategy[list[GroupLabel]] = st.lists(
    st.sampled_from(["kept", "no_spread", "too_hard", "quarantined"]), max_size=4
)


def accepted(digest: int, labels: list[GroupLabel], *, step: int = 0, refill: bool) -> Accepted:
    verdict = Verdict(
        submission=bytes([digest]) * 32,
        size_bytes=1,
        worker="Q" * 46,
        lineage=0,
        step=step,
        policy=0,
        number=digest,
        outcome="accepted",
        rewards=[[0.0, 1.0]] * len(labels),
    )
    fill = "refill" if refill else "drop"
    return Accepted(verdict.submission, verdict, "file", labels, fill)  # type: ignore[arg-type]


SUBMISSIONS = st.lists(
    st.builds(
        accepted,
        st.integers(0, 20),
        LABELS,
        step=st.integers(0, 3),
        refill=st.booleans(),
    ),
    max_size=12,
)


# --- the pool --------------------------------------------------------------------------------


@given(SUBMISSIONS, st.lists(st.integers(0, 20), max_size=6))
def test_it_counts_the_groups_that_it_holds(added: list[Accepted], removed: list[int]) -> None:
    pool = Pool()
    for each in added:
        pool.add(each)
    for digest in removed:
        pool.remove(bytes([digest]) * 32)
    held = pool.oldest_first()
    assert len(pool) == len(held) == len({each.digest for each in held})
    assert pool.groups == sum(each.counted for each in held)
    assert all("quarantined" not in each.labels or each.counted < len(each.labels) for each in held)


@given(SUBMISSIONS, st.integers(0, 20))
def test_a_batch_is_the_oldest_submissions_and_no_more_than_needed(
    added: list[Accepted], wanted: int
) -> None:
    pool = Pool()
    for each in added:
        pool.add(each)
    before = pool.oldest_first()
    taken = pool.take(wanted)
    assert [*taken, *pool.oldest_first()] == before
    counted = [each.counted for each in taken]
    assert sum(counted) >= min(wanted, sum(each.counted for each in before))
    assert not taken or sum(counted[:-1]) < wanted


def test_with_refill_only_kept_groups_count() -> None:
    labels: list[GroupLabel] = ["kept", "no_spread", "kept"]
    assert accepted(1, labels, refill=True).counted == 2
    assert accepted(1, labels, refill=False).counted == 3


def test_two_files_for_the_same_work_have_one_key() -> None:
    first, second = (accepted(1, labels, refill=False) for labels in (["kept"], []))  # type: ignore[arg-type]
    assert SubmissionKey.of(first.verdict) == SubmissionKey.of(second.verdict)
    assert SubmissionKey.of(accepted(2, [], refill=False).verdict).number == 2


# --- the forecast ----------------------------------------------------------------------------

OFFER = ("worker", b"digest")


def test_groups_are_coming_from_the_announcement_until_they_are_settled() -> None:
    forecast = Forecast()
    assert forecast.announce(OFFER, 4, now=0.0, has_stake=True)
    assert forecast.announce(OFFER, 9, now=1.0, has_stake=True), "the first word on a file counts"
    assert forecast.coming() == 4
    forecast.judge(OFFER, "accepted", now=0.0)
    assert forecast.coming() == 4, "its file is being fetched"
    forecast.settle(OFFER)
    assert forecast.coming() == 0


def test_an_acknowledgement_after_the_verdict_is_not_waited_for() -> None:
    forecast = Forecast()
    forecast.judge(OFFER, "accepted", now=0.0)
    assert not forecast.announce(OFFER, 4, now=0.0, has_stake=True)
    forecast.judge(("worker", b"later"), "accepted", now=1.0)
    forecast.forget_late(JUDGED_SECONDS)
    assert not forecast.announce(OFFER, 4, now=JUDGED_SECONDS, has_stake=True)
    forecast.forget_late(JUDGED_SECONDS + 0.5)
    assert forecast.announce(OFFER, 4, now=JUDGED_SECONDS + 0.5, has_stake=True), (
        "no acknowledgement comes so late"
    )
    assert not forecast.announce(("worker", b"later"), 4, now=JUDGED_SECONDS + 0.5, has_stake=True)


def test_so_many_judged_submissions_are_remembered() -> None:
    forecast = Forecast()
    forecast.judge(OFFER, "accepted", now=0.0)
    for number in range(JUDGED_MAX):
        forecast.judge(("worker", number.to_bytes(4, "big")), "accepted", now=0.0)
    assert forecast.announce(OFFER, 4, now=0.0, has_stake=True), "the oldest is forgotten"


def test_what_is_not_judged_for_long_leaves_the_forecast_as_wasted() -> None:
    forecast = Forecast()
    forecast.announce(OFFER, 4, now=0.0, has_stake=True)
    forecast.announce(("worker", b"later"), 2, now=1.0, has_stake=True)
    assert forecast.forget_late(UNJUDGED_SECONDS) == 0
    assert not forecast.quota_spent(refill=False)
    assert forecast.forget_late(UNJUDGED_SECONDS + 0.5) == 1
    assert forecast.coming() == 2
    assert forecast.quota_spent(refill=False)


def test_quota_is_spent_by_what_serves_no_batch_until_the_next_order() -> None:
    forecast = Forecast()
    forecast.judge(OFFER, "accepted", now=0.0)
    assert not forecast.quota_spent(refill=False)
    assert forecast.quota_spent(refill=True), "what was accepted may fill nothing"
    forecast.judge(OFFER, "refused", now=0.0)
    assert forecast.quota_spent(refill=False)
    forecast.order_issued()
    assert not forecast.quota_spent(refill=True)
    forecast.waste(1)
    assert forecast.quota_spent(refill=False)


def test_nothing_is_expected_of_a_worker_that_was_refused_until_it_is_accepted() -> None:
    """Or it could hold up a step, or have more asked of everybody, as often as it likes."""
    forecast = Forecast()
    forecast.judge(("worker", b"0"), "refused", now=0.0)
    assert forecast.quota_spent(refill=False), "the first one is made up for at once"
    forecast.order_issued()
    for number in range(1, 9):
        offer = ("worker", b"%d" % number)
        assert not forecast.announce(offer, 4, now=0.0, has_stake=True)
        forecast.judge(offer, "refused", now=0.0)
    assert forecast.coming() == 0 and not forecast.quota_spent(refill=True)
    assert forecast.announce(("another", b"0"), 4, now=0.0, has_stake=True)
    forecast.judge(("worker", b"9"), "accepted", now=0.0)
    assert forecast.announce(("worker", b"10"), 4, now=0.0, has_stake=True)
    forecast.judge(("worker", b"10"), "quarantined", now=0.0)
    assert forecast.quota_spent(refill=False), "a validator's fault is made up for"
    assert forecast.announce(("worker", b"11"), 4, now=0.0, has_stake=True)


def test_files_of_workers_without_a_record_are_not_expected() -> None:
    """An acknowledgement says that a file has arrived, not that anything is in it."""
    forecast = Forecast()
    for number in range(4):
        assert not forecast.announce((f"new-{number}", b"1"), 4, now=0.0, has_stake=False)
    assert forecast.coming() == 0
    forecast.judge(("new-0", b"1"), "accepted", 1.0)
    assert forecast.announce(("new-0", b"2"), 4, now=1.0, has_stake=False)
    forecast.judge(("new-0", b"3"), "refused", 2.0)
    assert not forecast.announce(("new-0", b"4"), 4, now=2.0, has_stake=True)
    assert forecast.coming() == 4


def test_checks_that_take_minutes_stay_in_the_forecast() -> None:
    forecast = Forecast()
    forecast.announce(OFFER, 4, now=0.0, has_stake=True)
    assert forecast.forget_late(UNJUDGED_SECONDS + 1) == 1
    forecast.judge(OFFER, "accepted", now=120.0)
    forecast.announce(("worker", b"later"), 4, now=120.0, has_stake=True)
    assert forecast.forget_late(120.0 + 300.0) == 0 and forecast.coming() == 4
    assert forecast.forget_late(120.0 + 400.0) == 1
