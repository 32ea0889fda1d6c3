from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode

from benchmarks.groups import Group, make_batch
from peers.engines.loading import load as load_model
from peers.engines.native import NativeEngine
from peers.learning import packing, scorer
from peers.learning.attention import (
    attention_arguments,
    block_mask,
    fastest_attention,
    flex_mask,
    why_not,
)
from peers.learning.batch import Batch
from peers.learning.formulas import Tokens
from peers.learning.objective import Totals, loss
from peers.learning.packing import Layout, Rows, first_fit, lay_out
from peers.learning.scorer import Scorer
from swarm.rollouts.rollout import Rollout, Segment, Span
from swarm.wire.manifest import Objective
from tests.trainer.waits import Waits

TEMPERATURE = 0.7
WHOLE = {"full_attention": None}
"""A model without windows."""


def two_turns(prompt: list[int], completion: list[int], answer: list[int]) -> Rollout:
    """An episode in which the environment answers in the middle of the completion."""
    half = len(completion) // 2
    if half == 0:
        return Rollout.single_turn(prompt, completion)
    parts = [completion[:half], completion[half:]]
    first, last = (Segment("model", each, "stop", None, (Span(0, len(each)),)) for each in parts)
    return Rollout((Segment("prompt", prompt), first, Segment("environment", answer), last))


def spread_batch(seed: int, count: int = 14, longest: int = 40) -> Batch:
    """Sequences of very different lengths, some of them twice."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, shape: int = 1) -> list[int]:
        return torch.randint(low, high, (shape,), generator=generator).tolist()

    groups = []
    for _ in range(count // 2):
        completions = [draw(2, 14, draw(1, longest)[0]) for _ in range(2)]
        prompt = draw(4, 14, draw(1, 7)[0])
        rollouts = [
            Rollout.single_turn(prompt, completions[0]),
            two_turns(prompt, completions[1], draw(2, 14, draw(1, 5)[0])),
        ]
        groups.append(
            Group(
                [*rollouts, rollouts[0]], rewards=[1.0, 0.0, 1.0], policy=0, temperature=TEMPERATURE
            )
        )
    return make_batch(groups)


def scores(
    model: Any, batch: Batch, passes: list[Rows]
) -> tuple[torch.Tensor, torch.Tensor, float, dict[str, torch.Tensor]]:
    """Log-probabilities, entropies, loss and gradients of the whole batch, by pass."""
    model.zero_grad()
    scorer = Scorer(model)
    log_pi, entropy = torch.empty(batch.token_count()), torch.empty(batch.token_count())
    advantage = torch.linspace(-1, 1, batch.token_count())
    completion = batch.per_token(torch.arange(len(batch)))
    log_old = torch.linspace(-6, -2, batch.token_count())
    objective = Objective(kl_coefficient=0, entropy_coefficient=0.01)
    total = 0.0
    for rows in passes:
        here = rows.index
        new, h = scorer(rows, entropy_gradient=True)
        log_pi[here], entropy[here] = new.detach(), h.detach()
        tokens = Tokens(
            log_pi=new,
            log_old=log_old[here],
            log_mu=log_old[here],
            advantage=advantage[here],
            entropy=h,
            completion=completion[here],
        )
        value, _ = loss(objective, tokens, Totals(batch.token_count(), len(batch)))
        value.backward()  # type: ignore[no-untyped-call]
        total += float(value.detach())
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
    return log_pi, entropy, total, gradients


def alone(batch: Batch) -> list[Rows]:
    """Every sequence in a pass of its own, copies too."""
    passes, start = [], 0
    for number, length in enumerate(batch.completion_lengths.tolist()):
        one = Batch(
            tokens=batch.split(batch.tokens)[number],
            sampled=batch.split(batch.sampled)[number],
            **{
                name: getattr(batch, name)[number : number + 1]
                for name in ("lengths", "completion_lengths", "temperature")
            },
        )
        (rows,) = lay_out(one)
        passes.append(dataclasses.replace(rows, index=rows.index + start))
        start += length
    return passes


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return load_model(base).float().eval()


def assert_close(left: Any, right: Any) -> None:
    (log_pi, entropy, total, gradients), (other_pi, other_entropy, other_total, others) = (
        left,
        right,
    )
    torch.testing.assert_close(log_pi, other_pi, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, other_entropy, atol=1e-5, rtol=0)
    assert total == pytest.approx(other_total, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("tokens_max", [1 << 14, 60])
@pytest.mark.parametrize("layout", ["padded", "packed", "flat"])
def test_every_layout_equals_each_sequence_alone(
    model: Any, seed: int, tokens_max: int, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PASS_TOKENS_MAX", tokens_max)
    batch = spread_batch(seed)
    if layout == "flat":
        passes = lay_out(batch, "flat")
        assert all(len(rows.tokens) == 1 for rows in passes)
    else:
        passes = lay_out(batch, layout)
    assert all(rows.tokens.numel() <= tokens_max for rows in passes)
    assert all(rows.packed == (layout != "padded") for rows in passes)
    assert_close(scores(model, batch, passes), scores(model, batch, alone(batch)))


def test_eager_attention_takes_the_same_mask(base: Path, model: Any) -> None:
    eager = load_model(base).float().eval()
    eager.set_attn_implementation("eager")
    batch = spread_batch(2)
    passes = lay_out(batch, "packed")
    assert_close(scores(eager, batch, passes), scores(model, batch, alone(batch)))


def test_flex_attention_keeps_sequences_apart(
    base: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward only, interpreted: on a CPU it has no backward pass, and compiling takes long."""
    monkeypatch.setattr(
        "transformers.integrations.flex_attention.WrappedFlexAttention",
        lambda training: lambda: flex_attention,
    )
    monkeypatch.setattr(
        "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True
    )
    flex = load_model(base).float().eval()
    flex.set_attn_implementation("flex_attention")
    batch = spread_batch(8)
    expected = scores(model, batch, alone(batch))[0]
    for passes in (lay_out(batch, "flat"), lay_out(batch, "packed")):
        found = torch.empty(batch.token_count())
        with torch.no_grad():
            for rows in passes:
                found[rows.index] = Scorer(flex)(rows)[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What flash attention's kernel for packed rows promises, piece by piece; [1, H, S, D] each."""
    assert attention_mask is None and torch.equal(cu_seq_lens_q, cu_seq_lens_k)
    assert max_length_q == max_length_k == int(cu_seq_lens_q.diff().max())
    starts = cu_seq_lens_q.tolist()
    pieces = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            enable_gqa=True,
        )
        for start, end in itertools.pairwise(starts)
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def test_flash_attention_is_told_enough_to_keep_sequences_apart(base: Path, model: Any) -> None:
    """Through the model's layers, with a stand-in for the kernel, which needs a GPU."""
    from transformers import AttentionInterface

    AttentionInterface.register("flash_attention_promised", varlen_attention)
    flash = load_model(base).float().eval()
    flash.config._attn_implementation = "flash_attention_promised"
    batch = spread_batch(9)
    assert_close(scores(flash, batch, lay_out(batch, "flat")), scores(model, batch, alone(batch)))


def test_equals_the_engine(model: Any, base: Path) -> None:
    batch = spread_batch(3)
    sequences = [tokens.tolist() for tokens in batch.split(batch.tokens)]
    sampled = [mask.nonzero()[:, 0].tolist() for mask in batch.split(batch.sampled)]
    completions = [
        [tokens[index] for index in indices]
        for tokens, indices in zip(sequences, sampled, strict=True)
    ]
    engine = NativeEngine(base)
    states = engine.prefill(sequences, sampled).states
    log_all = [torch.log_softmax(engine.logits(each) / TEMPERATURE, -1) for each in states]
    log_pi, entropy, _, _ = scores(model, batch, lay_out(batch, "packed"))
    expected = [
        values[range(len(completion)), completion]
        for values, completion in zip(log_all, completions, strict=True)
    ]
    torch.testing.assert_close(log_pi, torch.cat(expected), atol=2e-5, rtol=0)
    expected_entropy = [-(values.exp() * values).sum(-1) for values in log_all]
    torch.testing.assert_close(entropy, torch.cat(expected_entropy), atol=2e-5, rtol=0)


def test_without_entropy_it_is_zero_and_nothing_else_changes(model: Any) -> None:
    (rows,) = lay_out(spread_batch(4), "packed")
    with_entropy, _ = Scorer(model)(rows)
    log_pi, entropy = Scorer(model)(rows, entropy=False)
    assert torch.equal(log_pi, with_entropy)
    assert not entropy.any()


class Logits(TorchFunctionMode):
    """Watches the logits that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        result = function(*arguments, **(named or {}))
        if function is torch.nn.functional.linear and result.shape[-1] == 64:
            self.sizes.append(result.numel())
        return result


def test_the_head_in_pieces_changes_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by the tokens whose logits are held at once."""
    batch = spread_batch(5)
    whole = scores(model, batch, lay_out(batch, "packed"))
    monkeypatch.setitem(scorer.LOGITS_MAX, "cpu", 64 * 7)
    with Logits() as held:
        pieces = scores(model, batch, lay_out(batch, "packed"))
    assert max(held.sizes) == 64 * 7
    assert len(held.sizes) > 20
    assert_close(pieces, whole)


# --- a leak is caught ----------------------------------------------------------------------------


def leaking(rows: Rows, kind: str) -> Rows:
    """Rows whose sequences see each other."""
    if kind == "mask":  # attention takes the whole row for one sequence
        return dataclasses.replace(rows, sequence=rows.sequence.clamp(max=0))
    sequence = rows.sequence.clone()
    sequence[sequence == 1] = 0  # a single pair of neighbours
    return dataclasses.replace(rows, sequence=sequence)


@pytest.mark.parametrize("kind", ["mask", "pair"])
def test_a_planted_leak_is_caught(model: Any, kind: str) -> None:
    batch = spread_batch(6)
    passes = [leaking(rows, kind) for rows in lay_out(batch, "packed")]
    with pytest.raises(AssertionError):
        assert_close(scores(model, batch, passes), scores(model, batch, alone(batch)))


@settings(deadline=None, max_examples=10)  # shared cores
@given(st.integers(0, 2**32))
def test_masks_hold_exactly_the_earlier_tokens_of_the_same_sequence(seed: int) -> None:
    window = seed % 5 or None
    for rows in lay_out(spread_batch(seed, count=6, longest=9), "packed"):
        mask = block_mask(rows, window)[:, 0]
        count, width = rows.tokens.shape
        for row in range(count):
            for query in range(width):
                first = 0 if window is None else query - window + 1
                expected = [
                    rows.sequence[row, key] == rows.sequence[row, query] and first <= key <= query
                    for key in range(width)
                ]
                assert mask[row, query].tolist() == expected
        blocks = flex_mask(rows, window)
        places = torch.meshgrid(*map(torch.arange, (count, width, width)), indexing="ij")
        assert torch.equal(blocks.mask_mod(places[0], torch.zeros(()), *places[1:]), mask)


def test_kernels_for_packed_rows_are_told_where_sequences_begin() -> None:
    (rows,) = lay_out(spread_batch(7), "flat")
    with Waits() as waits:
        arguments = attention_arguments("flash_attention_2", rows, WHOLE)
    assert waits.found == []
    lengths = [
        int((rows.sequence == number).sum()) for number in range(int(rows.sequence.max()) + 1)
    ]
    assert arguments["cu_seq_lens_q"].tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert arguments["cu_seq_lens_q"].dtype == torch.int32
    assert arguments["max_length_k"] == max(lengths)
    assert arguments["attention_mask"] is None
    assert attention_arguments("flex_attention", rows, WHOLE)["attention_mask"].shape[-1] >= sum(
        lengths
    )
    several = lay_out(spread_batch(7), "packed")[0]
    with pytest.raises(ValueError, match="single row"):
        attention_arguments("flash_attention_2", several, WHOLE)


def test_attention_by_device(model: Any) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert fastest_attention(model, cpu) == "sdpa"
    assert fastest_attention(model, cuda) == "flex_attention"  # flash knows 16 bits only
    assert fastest_attention(model, cuda, True) in ("flash_attention_2", "flex_attention")
    assert "backward" in why_not("flex_attention", cpu)
    assert "16 bits" in why_not("flash_attention_2", cuda)


# --- packing -------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 80))
def test_first_fit_decreasing(lengths: list[int], capacity: int) -> None:
    """Each, longest first, goes into the first bin with room, or opens one."""
    expected: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        for some in expected:
            if sum(lengths[other] for other in some) + lengths[place] <= capacity:
                some.append(place)
                break
        else:
            expected.append([place])
    assert first_fit(lengths, capacity) == expected


@settings(deadline=None)  # shared cores
@given(st.integers(0, 2**32), st.sampled_from(["padded", "packed", None]))
def test_rows_hold_every_sequence_once_and_answer_for_every_token(
    seed: int, layout: Layout | None
) -> None:
    batch = spread_batch(seed, count=8, longest=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "PASS_TOKENS_MAX", 48)
        passes = lay_out(batch, layout)
    answered = torch.cat([rows.index for rows in passes])
    assert sorted(answered.tolist()) == list(range(batch.token_count()))
    completions = batch.tokens[batch.sampled]
    for rows in passes:
        assert torch.equal(rows.target[rows.source], completions[rows.index])
        assert len(set(rows.predictor.tolist())) == len(rows.predictor)
        used = rows.sequence >= 0
        starts = rows.positions[used] == 0
        assert int(starts.sum()) == sum(int(row.max()) + 1 for row in rows.sequence)
    distinct = {
        (*tokens.tolist(), *mask.tolist())
        for tokens, mask in zip(batch.split(batch.tokens), batch.split(batch.sampled), strict=True)
    }
    computed = sum(int((rows.sequence >= 0).sum()) for rows in passes)
    assert computed == sum(len(each) // 2 - 1 for each in distinct)


def test_equal_tokens_of_other_turns_are_other_sequences(model: Any) -> None:
    """Only sampled tokens are scored, and what was sampled tells sequences apart."""
    one = Rollout.single_turn([4, 5], [6, 7, 8, 9])
    other = two_turns([4, 5], [6, 9], [7, 8])
    assert one.tokens == other.tokens
    batch = make_batch([Group([one, other], [0.0, 1.0], 0)])
    assert batch.token_count() == 6
    for layout in ("padded", "packed"):
        log_pi = scores(model, batch, lay_out(batch, layout))[0]
        torch.testing.assert_close(log_pi[[0, 3]], log_pi[4:], atol=1e-6, rtol=0)


def test_the_layout_is_chosen_by_the_spread_of_lengths() -> None:
    """Rows of like length gain nothing from packing; a few of very different length do."""

    def batch_of(lengths: list[int]) -> Batch:
        groups = [
            Group(
                [
                    Rollout.single_turn([4], [number % 60 + 3, *[5] * (length - 1)]),
                    Rollout.single_turn([4], [number % 60 + 3] * length),
                ],
                rewards=[0.0, 1.0],
                policy=0,
            )
            for number, length in enumerate(lengths)
        ]
        return make_batch(groups)

    assert not any(rows.packed for rows in lay_out(batch_of([40] * 30)))
    assert all(rows.packed for rows in lay_out(batch_of([300, *[3] * 40])))
