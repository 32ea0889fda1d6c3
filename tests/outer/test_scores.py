"""What strangers' contributions are worth: scores, ratings, weights, and their bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from peers.outer.chain import BadRecord, Chain
from peers.outer.gathering import SCORERS, ranking
from peers.outer.learning import contribution
from peers.outer.learning.contribution import Contribution, write_values
from peers.outer.learning.scoring import Copies
from peers.outer.learning.state import NORM_MEDIANS, shares
from peers.outer.rating import (
    DIFFERS,
    FALLS,
    FULL,
    NOISE,
    agreed,
    assignment,
    is_contradicted,
    rate,
    updated,
    weight,
    weights,
)
from swarm.jobs.outer import Offered, Scored, ScoreRound, TrainRound
from swarm.wire.envelope import Envelope, seal
from swarm.wire.outer import RATED_MAX, SCORE_MAX, Measured, Rated, RoundRecord
from tests.outer.records import RUN, TRAINERS, record
from tests.outer.records import contribution as contributed
from tests.outer.test_replica import Trainer, base, job_of, text

__all__ = ["base", "text"]

scores = st.integers(-SCORE_MAX, SCORE_MAX)
BEST = (SCORE_MAX, SCORE_MAX)


# --- ratings ---------------------------------------------------------------------------------


def after(*given_: tuple[int, int]) -> float:
    """A stranger's weight after these scores."""
    rated: list[Rated] = []
    for each in given_:
        rated = rate(rated, {"s": each})
    return weight(rated[0]) if rated else 0.0


def test_three_good_rounds_reach_the_full_weight_and_one_bad_round_ends_it() -> None:
    found = [after(*[BEST] * rounds) for rounds in (1, 2, 3, 4)]
    assert found[0] == 0.0 and 0.5 < found[1] < 1.0 and found[2:] == [1.0, 1.0]
    assert after(*[BEST] * 20, (FALLS, SCORE_MAX)) == 0.0
    assert after(*[BEST] * 20, (SCORE_MAX, FALLS), BEST) == 0.0


@given(st.lists(st.tuples(scores, scores), min_size=1, max_size=30))
def test_ratings_stay_within_the_scores(given_: list[tuple[int, int]]) -> None:
    assert 0.0 <= after(*given_) <= 1.0
    rating = 0
    for gain, _ in given_:
        rating = updated(rating, gain)
        assert -SCORE_MAX <= rating <= SCORE_MAX


def test_noise_alone_weighs_almost_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = (1000 * torch.randn(4000, 2, generator=generator)).clamp(-SCORE_MAX, SCORE_MAX)
    rated, total = list[Rated](), 0.0
    for gain, own in drawn.round().int().tolist():
        rated = rate(rated, {"s": (gain, own)})
        total += weight(rated[0]) if rated else 0.0
    assert total / len(drawn) < 0.001


def test_a_record_keeps_so_many_ratings_and_forgets_old_ones() -> None:
    rated = rate([], {f"{each:03}": BEST for each in range(RATED_MAX)})
    rated = rate(rated, {f"new-{each}": (1, 0) for each in range(3)})
    assert len(rated) == RATED_MAX
    assert sum(each.trainer.startswith("new") for each in rated) == 3
    for _ in range(13):
        rated = rate(rated, {})
    assert rated == []


def rated_record(signer: int, rated: list[Rated], parent: Envelope | None = None) -> Envelope:
    """A record of trainer 0, and of stranger 1 if it weighs something."""
    plain = record([contributed(0)]) if parent is None else None
    message = plain.expect(RoundRecord) if plain else record([], parent).expect(RoundRecord)
    own = [contributed(0, message.parent, message.round - 1)]
    if any(weight(each) for each in rated):
        own.append(contributed(1, message.parent, message.round - 1))
    listed = sorted(own, key=lambda each: each.trainer)
    before = parent.expect(RoundRecord).tokens if parent is not None else 0
    tokens = before + sum(each.tokens for each in listed)
    message = replace(message, rated=rated, contributions=listed, tokens=tokens)
    return seal(
        TRAINERS[signer], message, run=RUN, sequence=1, wall_time=1e9, lifetime_seconds=3600.0
    )


def test_the_chain_takes_only_ratings_that_follow_from_its_scores() -> None:
    stranger = TRAINERS[1].peer_id
    chain, parent, rated = Chain(1), None, list[Rated]()
    for _ in range(3):
        rated = rate(rated, {stranger: BEST})
        envelope = rated_record(0, rated, parent)
        assert chain.add(envelope)
        parent = envelope
    assert parent is not None
    last = parent.expect(RoundRecord)
    assert weights(last.rated) == {stranger: 1.0}
    made_up = [replace(rated[0], gain_rating=SCORE_MAX, own_rating=SCORE_MAX)]
    with pytest.raises(BadRecord, match="do not follow from its scores"):
        chain.add(rated_record(0, made_up, parent))
    with pytest.raises(BadRecord, match="lists strangers alone, or one without a weight"):
        low = [Rated(trainer=stranger, gain=5, own=5)]
        message = replace(record([contributed(0), contributed(1)]).expect(RoundRecord), rated=low)
        chain.add(
            seal(TRAINERS[0], message, run=RUN, sequence=2, wall_time=1e9, lifetime_seconds=60.0)
        )


def test_each_stranger_and_round_has_sequences_of_its_own() -> None:
    drawn = {
        assignment(run, round, bytes([base]) * 32, peer)
        for run in ("r", "s")
        for round in (1, 2)
        for base in (1, 2)
        for peer in ("p", "q")
    }
    assert len(drawn) == 16


# --- several scorers ---


def said(*gains: int | None, artifact: bytes = b"1") -> list[dict[str, Measured]]:
    """What scorers say of one stranger; None: nothing."""
    return [{} if each is None else {"s": Measured("s", artifact, each, each)} for each in gains]


def test_a_score_is_the_median_and_needs_a_majority() -> None:
    for gains, wanted in (
        ((3000,), 3000),
        ((3000, 3000, -3000), 3000),
        ((-3000, -3000, 3000), -3000),
        ((3000, None, None), 0),
        ((3000, 2000, None), 2000),
        ((3000, 1000), 1000),
        ((3000, None), 0),
    ):
        (found,) = agreed(said(*gains)).values()
        assert (found.gain, found.own) == (wanted, wanted), gains
    assert agreed([]) == {}


@given(st.lists(scores, min_size=2, max_size=2), scores)
def test_one_that_lies_stays_within_what_the_others_say(honest: list[int], lie: int) -> None:
    (found,) = agreed(said(*honest, lie)).values()
    assert min(honest) <= found.gain <= max(honest)


@pytest.mark.parametrize(
    ("trainers", "together", "friend", "good"),
    [(3, 1.0, 1.0, 0.0), (8, 0.11, 0.01, 0.7), (14, 0.033, 0.001, 0.9)],
)
def test_two_liars_decide_the_rounds_in_which_two_of_the_scorers_are_theirs(
    trainers: int, together: float, friend: float, good: float
) -> None:
    """Each of those rounds ends a good record; to make one for noise takes several in a row."""
    names = tuple(f"{each:02}" for each in range(trainers))
    rounds, theirs = 3000, 0
    rated, weight_of = list[Rated](), {"friend": 0.0, "good": 0.0}
    truth = {"friend": (-1700, -200), "good": (2900, 3000)}
    lie = {"friend": BEST, "good": (-SCORE_MAX, -SCORE_MAX)}
    for round_ in range(rounds):
        scorers = ranking(names, RUN, round_)[:SCORERS]
        told = [lie if each in names[:2] else truth for each in scorers]
        theirs += told.count(lie) >= 2
        measured = [
            {who: Measured(who, b"1", *score) for who, score in each.items()} for each in told
        ]
        found = agreed(measured)
        rated = rate(rated, {who: (each.gain, each.own) for who, each in found.items()})
        for who, heavy in weights(rated).items():
            weight_of[who] += heavy / rounds
    assert theirs / rounds == pytest.approx(together, rel=0.2)
    assert weight_of["friend"] <= friend and weight_of["good"] >= good


def test_a_stranger_that_gives_each_scorer_another_file_counts_by_none() -> None:
    """Else it could show a good one to be scored, and have another one listed."""
    one, other = said(3000, 3000, artifact=b"1"), said(3000, artifact=b"2")
    assert agreed([*one, *other])["s"] == Measured("s", b"1", 3000, 3000)
    split = [*said(3000), *said(3000, artifact=b"2"), *said(3000, artifact=b"3")]
    assert (agreed(split)["s"].gain, agreed(split)["s"].own) == (0, 0)


@pytest.mark.parametrize(
    ("stated", "others", "expected"),
    [
        (3000, (3000, 2000), False),
        (1500, (3000, 2000), False),
        (2000 - DIFFERS - 1, (3000, 2000), True),
        (3000, (0, -3000), True),
        (None, (3000, 3000), True),
        (None, (3000, None), False),
        (3000, (3000, None), False),
        (-3000, (3000, 3000), True),
    ],
)
def test_a_record_that_all_others_contradict_is_known(
    stated: int | None, others: tuple[int | None, ...], expected: bool
) -> None:
    rated = [] if stated is None else [Rated("s", stated, stated)]
    message = replace(record([contributed(0)]).expect(RoundRecord), rated=rated)
    assert is_contradicted(message, said(*others)) is expected


def test_what_a_record_lists_is_what_was_scored() -> None:
    """Not another file of the same stranger."""
    stranger, listed = TRAINERS[1].peer_id, contributed(1)
    message = replace(
        record([contributed(0), listed]).expect(RoundRecord), rated=[Rated(stranger, 3000, 3000)]
    )
    for artifact, expected in ((listed.artifact.digest, False), (bytes(32), True)):
        others = [{str(stranger): Measured(stranger, artifact, 3000, 3000)}] * 2
        assert is_contradicted(message, others) is expected


# --- the merge -------------------------------------------------------------------------------


@given(
    named=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=8),
    strangers=st.lists(st.tuples(st.floats(0.0, 1e9), st.floats(0.0, 1.0)), max_size=20),
    claim=st.integers(1, 1 << 44),
    share=st.floats(0.01, 0.9),
)
def test_strangers_have_their_share_of_the_mean_and_no_more(
    named: list[float], strangers: list[tuple[float, float]], claim: int, share: float
) -> None:
    norms = [*named, *(norm for norm, _ in strangers)]
    given_ = [*([None] * len(named)), *(each for _, each in strangers)]
    factors = shares([640] * len(named) + [claim] * len(strangers), norms, given_, share)
    typical = sorted(named)[(len(named) - 1) // 2]
    theirs = factors[len(named) :]
    moved = sum(factor * norm for factor, (norm, _) in zip(theirs, strangers, strict=True))
    assert moved <= share * typical * (1 + 1e-9)
    assert max(theirs, default=0.0) <= max(factors[: len(named)]) * (1 + 1e-9)
    assert sum(factors[: len(named)]) <= 1 + 1e-9


def test_without_strangers_the_merge_has_the_bits_that_it_had() -> None:
    tokens, norms = [100, 250, 120], [1.0, 9.0, 2.0]
    assert shares(tokens, norms, [None] * 3, 0.5) == shares(tokens, norms)
    assert shares(tokens, norms)[1] == 120 / 340 * (NORM_MEDIANS * 2.0 / 9.0)


# --- scoring ---------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [2, 3, 8])
@pytest.mark.parametrize("common", [0.0, 1.0, 6.0])
def test_copies_are_found_where_all_learn_much_the_same(named: int, common: float) -> None:
    """As early in pre-training, when whole contributions of independent trainers have 0.97."""
    generator = torch.Generator().manual_seed(named)

    def noise() -> Tensor:
        return torch.randn(1 << 14, generator=generator)

    shared = common * noise()
    trainers = [shared + noise() for _ in range(named)]
    copies = Copies(trainers)
    honest = [shared + noise() for _ in range(4)]
    assert [copies.problem(each) for each in honest] == [""] * 4
    for original in (*trainers, *honest):
        assert "it is a copy: its cosine" in copies.problem(2 * original + 0.2 * noise())
    if common:
        mean = torch.stack(trainers).mean(0)
        assert "in common" in copies.problem(mean)
    assert copies.problem(torch.zeros(1 << 14)) == ""


def test_of_one_trainer_whole_contributions_are_compared() -> None:
    generator = torch.Generator().manual_seed(0)
    trainer, other = torch.randn(2, 1 << 14, generator=generator)
    copies = Copies([trainer])
    assert copies.problem(trainer + 0.7 * other) == ""
    assert "it is a copy" in copies.problem(trainer + 0.1 * other)


def test_a_trainer_tells_honest_work_from_what_only_looks_like_it(
    base: Path, tmp_path: Path
) -> None:
    lines = [
        f"line {n * 7919 % 1000} has {n % 7} {chr(97 + n % 26)} and no more." for n in range(900)
    ]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    job = job_of(base, tmp_path / "text.txt", inner_steps=8, validation_sequences=16)
    trainer = Trainer(tmp_path / "a", job)
    trainer.train(1)
    shapes = trainer.service._replica.shapes
    tokens = 8 * 4 * 32

    def train(name: str, seed: int) -> Path:
        made = TrainRound(
            round=1,
            state=trainer.path("state-0"),
            inner_before="",
            inner_after=trainer.path(f"inner-{name}"),
            contribution=trainer.path(name),
            seed=seed,
        )
        trio.run(trainer.service.train, made)
        return Path(trainer.path(name))

    def changed(name: str, change: Callable[[Tensor], Tensor]) -> Path:
        with Contribution(tmp_path / "a" / "honest" / contribution.FILE, shapes) as file:
            values = file.values()
        (tmp_path / name).mkdir()
        write_values(change(values), shapes, tmp_path / name / contribution.FILE)
        return tmp_path / name

    generator = torch.Generator().manual_seed(1)

    def noise(values: Tensor) -> Tensor:
        drawn = torch.randn(len(values), generator=generator)
        return drawn * (values.norm() / drawn.norm())

    folders = {
        "honest": train("honest", 5),
        "elsewhere": train("elsewhere", 6),
        "garbage": changed("garbage", noise),
        "flipped": changed("flipped", lambda values: -values),
        "copy": changed("copy", lambda values: values + 0.1 * noise(values)),
        "zeros": changed("zeros", torch.zeros_like),
    }
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / contribution.FILE).write_bytes(b"no")
    folders["broken"] = tmp_path / "broken"
    folders["gone"] = tmp_path / "gone"
    score = ScoreRound(
        state=trainer.path("state-0"),
        named=[trainer.path("contribution-1")],
        strangers=[
            Offered(trainer=name, folder=str(folder), tokens=tokens, seed=5)
            for name, folder in folders.items()
        ],
        draw=bytes(32),
    )
    found = {each.trainer: each for each in trio.run(trainer.service.score, score)}
    assert list(found) == list(folders)
    assert found == {each.trainer: each for each in trio.run(trainer.service.score, score)}
    assert found["honest"].gain >= FULL and found["honest"].own >= FULL
    assert found["elsewhere"].gain >= FULL and found["elsewhere"].own < found["honest"].own - NOISE
    assert found["garbage"].gain < NOISE
    assert found["flipped"].gain == -SCORE_MAX
    assert (
        found["zeros"] == Scored(trainer="zeros", gain=found["zeros"].gain, own=0, share=0.0)
        and found["zeros"].gain <= 0
    )
    assert "it is a copy" in found["copy"].problem
    assert found["broken"].problem == "the file is no contribution of this version"
    assert found["broken"].gain == found["copy"].own == -SCORE_MAX
    assert found["gone"].gain == -SCORE_MAX and "No such file" in found["gone"].problem
    unread = replace(score, named=[str(tmp_path / "gone"), *score.named])
    assert len(trio.run(trainer.service.score, unread)) == len(folders)
    assert trio.run(trainer.service.score, replace(score, named=[str(tmp_path / "gone")])) == []
