"""Each rank reads its share of an accepted submission."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from benchmarks.groups import Group, as_accepted
from peers.demo.recipes import SAMPLING
from peers.learning.batch import AcceptedGroups
from peers.learning.ranks import Launch, Ranks
from peers.learning.reading import read_groups
from peers.learning.scoring import completions_of
from swarm.jobs.training import AcceptedSubmission
from swarm.rollouts.rollout import Rollout, Segment, Span
from swarm.rollouts.rollouts import Rollouts, Row
from swarm.wire.messages import RewardParts

NAME = bytes(range(32))


def rollout(seed: int, turns: int) -> Rollout:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> list[int]:
        length = int(torch.randint(1, 6, (1,), generator=generator))
        return torch.randint(4, 14, (length,), generator=generator).tolist()

    segments = [Segment("prompt", draw())]
    for turn in range(turns):
        tokens = draw()
        reported = torch.rand(len(tokens), generator=generator).neg().tolist()
        spans = (Span(3, len(tokens)),)
        segments.append(Segment("model", tokens, "stop", reported, spans))
        if turn < turns - 1:
            segments.append(Segment("environment", draw()))
    return Rollout(tuple(segments))


def submission(groups: list[Group], path: Path) -> AcceptedSubmission:
    rows = [
        Row(index, sample, 0, each, b"")
        for index, group in enumerate(groups)
        for sample, each in enumerate(group.rollouts)
    ]
    raw = Rollouts.from_rows(rows).to_bytes()
    path.write_bytes(raw)
    return AcceptedSubmission(
        digest=NAME,
        path=str(path),
        rollouts_digest=blake3(raw).digest(),
        policy=3,
        rewards=[list(group.rewards) for group in groups],
        temperatures=[SAMPLING.temperature],
        kept=[group.kept for group in groups],
    )


def same(left: AcceptedGroups, right: AcceptedGroups) -> bool:
    return all(
        torch.equal(value.double(), vars(right)[name].double())
        if isinstance(value, torch.Tensor)
        else value == vars(right)[name]
        for name, value in vars(left).items()
    )


@hypothesis_settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 3), min_size=1, max_size=4), st.booleans(), st.booleans()
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 3),
)
def test_what_ranks_read_is_what_is_in_the_file_once(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[list[int], bool, bool]], world: int
) -> None:
    groups = [
        Group(
            [rollout(100 * index + sample, turns) for sample, turns in enumerate(samples)],
            [float(spread and sample == 0) for sample in range(len(samples))],
            policy=3,
            kept=kept,
        )
        for index, (samples, spread, kept) in enumerate(shapes)
    ]
    given = submission(groups, tmp_path_factory.mktemp("read") / "rollouts")
    rows: list[int] = []
    for rank in range(world):
        ranks = Ranks(Launch(rank, world, rank))
        found = read_groups(given, ranks)
        (expected,) = as_accepted(groups, NAME.hex(), ranks)
        assert same(expected, found)
        rows += found.rows.tolist()
    sizes = [len(group.rollouts) for group in groups]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    informative = as_accepted(groups)[0].informative
    wanted = [starts[index] + sample for index in informative for sample in range(sizes[index])]
    assert sorted(rows) == wanted


def test_a_group_is_divided_evenly_whichever_groups_a_step_trains_on() -> None:
    one = Rollout.single_turn([4, 5], [6, 7, 8])
    groups = [Group([one] * 4, [0.0, 1.0, 0.0, 1.0], 0)] * 3
    for rank in range(2):
        (found,) = as_accepted(groups, "x", Ranks(Launch(rank, 2, rank)))
        for index in range(3):
            assert len(found.batch([index])) == 2


def test_what_the_limit_cut_off_counts_in_its_group_and_is_not_trained_on(tmp_path: Path) -> None:
    def made(length: int, finish: Literal["stop", "length"]) -> Rollout:
        tokens = [5] * length
        return Rollout.single_turn([4], tokens, finish=finish, log_probabilities=[-1.0] * length)

    cut, whole = made(5, "length"), made(3, "stop")
    groups = [
        Group([cut, whole, whole], [0.0, 1.0, 0.5], policy=0),
        Group([cut, cut, cut], [0.0, 1.0, 0.5], policy=0),  # nothing to train on is left
        Group([whole, whole, cut], [0.0, 0.25, 1.0], policy=0),
    ]
    values = np.arange(9, dtype="<f4")
    given = msgspec.structs.replace(
        submission(groups, tmp_path / "rollouts"),
        policy=0,
        leaves_out_truncated=True,
        parts=RewardParts(names=["form"], values=values.tobytes()),
    )
    rows = []
    for rank in range(2):
        found = read_groups(given, Ranks(Launch(rank, 2, rank)))
        assert found.informative == [0, 2] and found.tokens_in([0, 2]) == 4 * 3
        some = completions_of([(found, [2]), (found, [0])])
        assert some.reward.tolist() == [0.0, 0.25, 1.0, 0.0, 1.0, 0.5]
        assert some.parts["form"].tolist() == [6, 7, 8, 0, 1, 2]
        assert some.length.tolist() == [3, 3, 5, 5, 3, 3]
        kept = [row for row in found.rows.tolist() if row > 5], [r for r in found.rows if r < 6]
        expected = [row - 6 for row in kept[0]] + [int(row) + 3 for row in kept[1]]
        assert some.here.tolist() == expected
        rows += found.rows.tolist()
    assert sorted(rows) == [1, 2, 6, 7]
    equal = [Group([whole, whole], [1.0, 1.0], policy=0)]
    alike = msgspec.structs.replace(submission(equal, tmp_path / "alike"), policy=0)
    assert read_groups(alike, Ranks()).informative == []
    taught = msgspec.structs.replace(alike, any_reward=True)
    assert read_groups(taught, Ranks()).informative == [0]
