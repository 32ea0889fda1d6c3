"""Shards: how values and work are divided, and that the merge is the same on every machine."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.outer.learning import contribution, state
from peers.outer.learning.contribution import (
    BLOCK,
    LEVELS,
    MEANS,
    Contribution,
    Header,
    cut,
    decode_piece,
    encode_piece,
    place,
)
from peers.outer.learning.service import FileJobs, Merging
from peers.outer.learning.tensor_file import Shapes
from peers.outer.sharing import audited, lines
from swarm.jobs.outer import Contributed, InspectContribution, MergeRound, MergeShard

SHAPES: Shapes = {"a.weight": (3, 700), "b.norm": (5,), "c.weight": (4, 1024)}

TRAINERS = tuple(f"trainer-{number:02}" for number in range(14))

sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=6)


@given(sizes=sizes, shards=st.integers(1, 64))
def test_shards_are_everything_once_and_nearly_equal(sizes: list[int], shards: int) -> None:
    shapes = {f"{number}": (size,) for number, size in enumerate(sizes)}
    found = [cut(shapes, shard, shards) for shard in range(shards)]
    covered = [
        (name, index) for each in found for name, part in each for index in range(5001)[part]
    ]
    assert covered == [(name, index) for name, (size,) in shapes.items() for index in range(size)]
    assert all(part.start % BLOCK == 0 for each in found for _, part in each)
    blocks = [sum(-(-(part.stop - part.start) // BLOCK) for _, part in each) for each in found]
    assert max(blocks) - min(blocks) <= 1


@given(shards=st.integers(1, 64), round=st.integers(1, 1000), gone=st.sets(st.integers(0, 12)))
def test_who_goes_away_moves_only_its_own_shards(shards: int, round: int, gone: set[int]) -> None:
    here = frozenset(TRAINERS) - {TRAINERS[number] for number in gone}
    before = lines(TRAINERS, "run", round, frozenset(TRAINERS), shards)
    after = lines(TRAINERS, "run", round, here, shards)
    firsts = [line[0] for line in before]
    assert max(map(firsts.count, TRAINERS)) - min(map(firsts.count, TRAINERS)) <= 1
    for old, new in zip(before, after, strict=True):
        assert new == tuple(trainer for trainer in old if trainer in here)


@given(share=st.floats(0.0, 1.0), others=st.integers(1, 63))
def test_a_shard_is_made_again_no_more_often_by_many_trainers(share: float, others: int) -> None:
    """What that costs in bytes is a part of all contributions for each, whatever their number."""
    times = others * audited(share, others)
    assert times == pytest.approx(min(others, 13) * share)
    assert 0.0 <= audited(share, others) <= share


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 20), count=st.integers(1, 3000))
def test_a_mean_loses_half_a_level_at_most(seed: int, count: int) -> None:
    """So none is clipped, though nobody keeps what is lost."""
    values = 1e-3 * torch.randn(count, generator=torch.Generator().manual_seed(seed))
    _, rest = encode_piece(MEANS["int8"], values)
    for block, missing in zip(values.split(BLOCK), rest.split(BLOCK), strict=True):
        assert float(missing.abs().max()) <= 0.501 * float(block.abs().max()) / LEVELS


class Trainer(FileJobs):
    """Merges by the production code."""

    def __init__(self, folder: Path, shards: int, shapes: Shapes = SHAPES) -> None:
        super().__init__()
        self._model = Merging(folder, None, shapes, torch.float32)
        self.folder, self.shards = folder, shards
        (folder / "before").mkdir(parents=True)
        state.begin(shapes, lambda n: torch.ones(shapes[n]), folder / "before" / state.FILE)

    def contribute(self, seed: int, compression: str = "int8", value: float = 0.0) -> Contributed:
        random_ = torch.Generator().manual_seed(seed)
        shapes = self._model.shapes
        values = {n: value + 1e-3 * torch.randn(s, generator=random_) for n, s in shapes.items()}
        folder = self.folder / f"from-{seed}"
        for shard in range(self.shards):
            path = place(folder, shard, self.shards)
            path.parent.mkdir(parents=True, exist_ok=True)
            header = Header(compression, list(shapes.items()), shard, self.shards)
            contribution.write(path, header, lambda n, piece: values[n].reshape(-1)[piece])
        return Contributed(trainer=f"{seed}", folder=str(folder), tokens=640)

    def shard(self, given: list[Contributed], shard: int, compression: str = "int8") -> bytes:
        parts = [
            Contributed(trainer=each.trainer, folder=f"{each.folder}/{shard}", tokens=each.tokens)
            for each in given
        ]
        job = MergeShard(
            contributions=parts,
            shard=shard,
            shards=self.shards,
            compression="fp32" if compression == "fp32" else "int8",
            folder=str(self.folder / f"mean-{shard}"),
        )
        return trio.run(self.merge_shard, job).digest

    def round(self, given: list[Contributed], shards: list[str]) -> bytes:
        job = MergeRound(
            state=str(self.folder / "before"),
            contributions=given,
            momentum=0.9,
            learning_rate=0.7,
            folder=str(self.folder / "after"),
            shards=shards,
        )
        return trio.run(self.merge, job).digest


@pytest.mark.parametrize("shards", [2, 5])
def test_a_merged_shard_follows_from_the_contributions(shards: int, tmp_path: Path) -> None:
    """Whoever merges it, in whatever order: so anybody can prove a wrong one."""
    one, other = Trainer(tmp_path / "one", shards), Trainer(tmp_path / "other", shards)
    given = [one.contribute(seed) for seed in range(4)]
    again = [other.contribute(seed) for seed in range(4)]
    random.Random(0).shuffle(again)
    for shard in range(shards):
        fewer, digest = one.shard(given[:3], shard), one.shard(given, shard)
        assert other.shard(again, shard) == digest != fewer
        job = InspectContribution(
            contribution=str(one.folder / f"mean-{shard}"), shard=shard, shards=shards
        )
        assert trio.run(other.inspect, job).digest == digest
    folders = [[str(t.folder / f"mean-{shard}") for shard in range(shards)] for t in (one, other)]
    assert one.round([], folders[0]) == other.round([], folders[1])


def test_without_compression_shards_lead_where_the_whole_does(tmp_path: Path) -> None:
    """Up to the bounds of norms, which are of a shard's values."""
    whole, parts = Trainer(tmp_path / "whole", 1), Trainer(tmp_path / "parts", 3)
    one = whole.round([whole.contribute(seed, "fp32") for seed in range(3)], [])
    given = [parts.contribute(seed, "fp32") for seed in range(3)]
    for shard in range(3):
        parts.shard(given, shard, "fp32")
    other = parts.round([], [str(parts.folder / f"mean-{shard}") for shard in range(3)])
    assert one == other


def test_a_bad_part_is_left_out_by_everyone(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "one", 2)
    good = [trainer.contribute(seed) for seed in range(2)]
    alone = trainer.shard(good, 0)
    bad = trainer.contribute(7)
    (Path(bad.folder) / "0" / contribution.FILE).write_bytes(b"no")
    assert trainer.shard([*good, bad], 0) == alone
    trainer.shard([], 1)
    with Contribution(tmp_path / "one/mean-1" / contribution.FILE, SHAPES, 1, 2) as file:
        assert not file.values().any()


def test_shards_of_another_model_or_place_are_refused(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "one", 2)
    other = Trainer(tmp_path / "other", 2, {"a.weight": (3, 701)})
    foreign, own = other.contribute(1), trainer.contribute(1)

    def problem(folder: str, shard: int, shards: int = 2) -> str:
        job = InspectContribution(contribution=folder, shard=shard, shards=shards)
        return trio.run(trainer.inspect, job).problem

    assert "tensor a.weight has shape (3, 701); the policy's is (3, 700)" in problem(
        f"{foreign.folder}/0", 0
    )
    assert problem(f"{own.folder}/0", 1) == "it is shard 0 of 2; shard 1 of 2 was due"
    assert problem(f"{own.folder}/0", 0, 3) == "it is shard 0 of 2; shard 0 of 3 was due"
    assert problem(f"{own.folder}/1", 1) == ""


def test_frames_of_a_mean_are_read_as_those_of_a_contribution() -> None:
    values = torch.tensor([3.0, -1.0, 0.0, math.pi])
    frame, rest = encode_piece(MEANS["int8"], values)
    assert torch.equal(decode_piece(contribution.CODES["int8"], frame, 4), values - rest)
