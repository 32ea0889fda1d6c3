"""Compression with error feedback, contribution files, and the merge of a round."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peers.outer.learning import contribution
from peers.outer.learning.contribution import (
    BLOCK,
    CLIP_SIGMAS,
    CODES,
    LEVELS,
    BadContribution,
    Contribution,
    Header,
    decode_piece,
    encode_piece,
    file_bytes_max,
    frame_bytes_max,
    write_values,
)
from peers.outer.learning.state import Given, OuterOptimiser, StateFile, begin, merge
from peers.outer.learning.tensor_file import Shapes
from swarm.errors import UserError

SHAPES = {"a.weight": (3, 700), "b.norm": (5,), "c.scalar": ()}


def draw(seed: int, count: int, scale: float = 1e-2) -> Tensor:
    """Values with a heavy tail and exact zeros, as of rare tokens."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * scale
    values *= torch.randn(count, generator=generator).abs().exp()
    return values * (torch.rand(count, generator=generator) > 0.3)


counts = st.integers(1, 3 * BLOCK)
seeds = st.integers(0, 10_000)


@settings(max_examples=25)
@given(name=st.sampled_from(sorted(CODES)), count=counts, seed=seeds)
def test_what_is_sent_and_what_is_kept_are_the_whole(name: str, count: int, seed: int) -> None:
    values = draw(seed, count)
    frame, rest = encode_piece(CODES[name], values)
    assert len(frame) <= frame_bytes_max(CODES[name], count)
    sent = decode_piece(CODES[name], frame, count)
    torch.testing.assert_close(sent + rest, values, rtol=1e-6, atol=1e-9)


@settings(max_examples=25)
@given(count=counts, seed=seeds)
def test_int8_errs_by_half_a_level_where_it_does_not_clip(count: int, seed: int) -> None:
    values = draw(seed, count)
    _, rest = encode_piece(CODES["int8"], values)
    for block, missing in zip(values.split(BLOCK), rest.split(BLOCK), strict=True):
        clip = CLIP_SIGMAS * float(block.square().mean().sqrt())
        inside = block.abs() <= clip
        if bool(inside.any()):
            assert float(missing[inside].abs().max()) <= 0.501 * clip / LEVELS + 1e-12
        if not bool(inside.all()):
            beyond = block[~inside].abs() - clip
            torch.testing.assert_close(
                missing[~inside].abs(), beyond, rtol=1e-2, atol=clip / LEVELS
            )


def test_int8_holds_heavy_tails() -> None:
    """INTELLECT-1's clip at 6σ; at 3σ the relative error of Laplace data is 12 %."""
    torch.manual_seed(0)
    values = torch.distributions.Laplace(0.0, 1e-3).sample((1 << 18,))
    _, rest = encode_piece(CODES["int8"], values)
    assert 0.01 < float(rest.norm() / values.norm()) < 0.02


@settings(max_examples=10)
@given(seed=seeds)
def test_feedback_delays_but_loses_nothing(seed: int) -> None:
    """The sums of what was computed and of what was sent differ by what is still kept."""
    count = BLOCK + 7
    kept = torch.zeros(count)
    computed, sent = torch.zeros(count), torch.zeros(count)
    for round_ in range(12):
        values = draw(seed + round_, count, 1e-3)
        computed += values
        frame, kept = encode_piece(CODES["int8"], values + kept)
        sent += decode_piece(CODES["int8"], frame, count)
    torch.testing.assert_close(sent + kept, computed, rtol=1e-4, atol=1e-6)


@settings(max_examples=40)
@given(name=st.sampled_from(sorted(CODES)), raw=st.binary(max_size=200), count=counts)
def test_any_bytes_decode_or_are_refused(name: str, raw: bytes, count: int) -> None:

    for frame in (raw, zstandard.compress(raw)):
        try:
            values = decode_piece(CODES[name], frame, count)
        except BadContribution:
            continue
        assert len(values) == count and bool(values.isfinite().all())


# --- files and the merge ---------------------------------------------------------------------


def make(path: Path, seed: int, compression: str = "int8", shapes: Shapes = SHAPES) -> Path:
    values = {name: draw(seed, math.prod(shape)) for name, shape in shapes.items()}
    contribution.write(
        path,
        Header(compression, list(shapes.items())),
        lambda name, piece: values[name][piece],
        lambda name, piece, rest: None,
    )
    return path


@pytest.fixture
def first(tmp_path: Path) -> StateFile:
    weights = {name: draw(9, math.prod(shape), 1.0).view(shape) for name, shape in SHAPES.items()}
    begin(SHAPES, lambda name: weights[name], tmp_path / "first")
    return StateFile(tmp_path / "first")


@pytest.mark.parametrize("compression", sorted(CODES))
def test_the_merge_is_nesterov_on_the_mean_whatever_the_order(
    compression: str, first: StateFile, tmp_path: Path
) -> None:
    before = {name: first.weight(name).clone() for name in SHAPES}
    given_ = [
        Given(f"trainer-{each}", 100 * (each + 1), make(tmp_path / f"{each}", each, compression))
        for each in range(4)
    ]
    digest = merge(first, given_, OuterOptimiser(0.7, 0.9), tmp_path / "second")
    random.Random(1).shuffle(given_)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    again = merge(first, given_, OuterOptimiser(0.7, 0.9), tmp_path / "again")
    torch.set_num_threads(threads)
    assert digest == again == StateFile(tmp_path / "second").digest()

    parameters = {name: torch.nn.Parameter(weight) for name, weight in before.items()}
    theirs = torch.optim.SGD(parameters.values(), lr=0.7, momentum=0.9, nesterov=True)
    found = first
    for path in (tmp_path / "second", tmp_path / "third"):
        merge(found, given_, OuterOptimiser(0.7, 0.9), path)
        for name, parameter in parameters.items():
            parameter.grad = torch.zeros_like(parameter)
            for each in given_:
                with Contribution(each.path, first.shapes) as file:
                    whole = slice(0, parameter.numel())
                    tokens = min(each.tokens, 200)  # no more than the median
                    parameter.grad += file.piece(name, whole) * tokens / 700
        theirs.step()
        found = StateFile(path)
        for name, parameter in parameters.items():
            torch.testing.assert_close(found.weight(name), parameter.detach())


def test_an_average_leads_to_the_state_that_the_contributions_lead_to(
    first: StateFile, tmp_path: Path
) -> None:
    given_, mean = [], torch.zeros(())
    for seed, (tokens, code) in enumerate([(200, "fp32"), (200, "int8"), (100, "fp32")]):
        path = make(tmp_path / f"{seed}", seed, code)
        given_.append(Given(f"trainer-{seed}", tokens, path))
        with Contribution(path, first.shapes) as file:
            mean = mean + file.values() * tokens / 500
    write_values(mean, first.shapes, tmp_path / "average")
    with Contribution(tmp_path / "average", first.shapes) as file:
        assert torch.equal(file.values(), mean)
    merge(first, given_, OuterOptimiser(), tmp_path / "by-list")
    average = [Given("average", 500, tmp_path / "average")]
    merge(first, average, OuterOptimiser(), tmp_path / "by-average")
    for name in SHAPES:
        weights = [StateFile(tmp_path / f"by-{how}").weight(name) for how in ("list", "average")]
        torch.testing.assert_close(*weights)


def test_pieces_do_not_change_the_bytes_of_a_state(
    first: StateFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_ = [Given("a", 1, make(tmp_path / "whole", 3))]
    digest = merge(first, given_, OuterOptimiser(), tmp_path / "one")
    monkeypatch.setattr(contribution, "PIECE", BLOCK)
    given_ = [Given("a", 1, make(tmp_path / "cut", 3))]
    assert merge(first, given_, OuterOptimiser(), tmp_path / "two") == digest


def test_a_file_is_within_its_bound(tmp_path: Path) -> None:
    for compression in CODES:
        path = make(tmp_path / "file", 1, compression)
        assert path.stat().st_size <= file_bytes_max(SHAPES, compression)


def test_refusals_name_the_fault(first: StateFile, tmp_path: Path) -> None:
    good = make(tmp_path / "good", 1, "fp32").read_bytes()

    def refused(raw: bytes, sentence: str) -> None:
        (tmp_path / "bad").write_bytes(raw)
        with (
            pytest.raises(BadContribution, match=sentence),
            Contribution(tmp_path / "bad", first.shapes) as file,
        ):
            file.check()

    refused(b"", "no contribution of this version")
    refused(good[:12], "header cannot be read")
    refused(good[:8] + struct.pack("<I", 1 << 31) + good[12:], "2147483648 bytes")
    refused(good[:-1], "its frames end at")
    refused(good + b"x", "its frames end at")
    refused(good.replace(b"fp32", b"fp33"), "compression 'fp33' is unknown")
    other = make(tmp_path / "other", 1, shapes={**SHAPES, "b.norm": (6,)})
    refused(other.read_bytes(), r"tensor b.norm has shape \(6,\); the policy's is \(5,\)")
    more = make(tmp_path / "more", 1, shapes={**SHAPES, "d": (1,)})
    refused(more.read_bytes(), "more than the policy's")
    header = Header("fp32", list(SHAPES.items()))

    def bad_value(value: float) -> bytes:
        contribution.write(
            tmp_path / "value",
            header,
            lambda name, piece: torch.full((piece.stop,), value),
            lambda name, piece, rest: None,
        )
        return (tmp_path / "value").read_bytes()

    refused(bad_value(math.nan), "a.weight: a value is not finite")
    refused(bad_value(101.0), "a.weight: a value is 101; 100 is the most")


def test_another_file_is_no_state(first: StateFile, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(first.path.read_bytes()[:-8])
    with pytest.raises(UserError, match="cannot be read"):
        StateFile(tmp_path / "bad")
    (tmp_path / "bad").write_bytes(first.path.read_bytes().replace(b"momentum.b", b"momentun.b"))
    with pytest.raises(UserError, match="each weight needs a momentum"):
        StateFile(tmp_path / "bad")
