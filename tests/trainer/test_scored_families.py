"""The scorer gives each family's log-probabilities and gradients, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from peers.engines.loading import blank, load
from peers.learning.batch import Batch
from peers.learning.packing import Rows, lay_out
from peers.learning.scorer import Scorer
from peers.learning.stored import StoredWeights, slices_of
from swarm.errors import UserError
from tests.engines.families import SIZES, SUPPORTED, WINDOW, save_random
from tests.trainer.test_packing import TEMPERATURE, spread_batch

BATCH = spread_batch(3, count=8, longest=5 * WINDOW)


def row_by_row(model: Any, batch: Batch) -> Tensor:
    """The log-probabilities, each sequence alone through the whole transformers model."""
    found = []
    for tokens, mask in zip(batch.split(batch.tokens), batch.split(batch.sampled), strict=True):
        logits = model(tokens[None]).logits[0, :-1] / TEMPERATURE
        chosen = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
        found.append(chosen[mask[1:].bool()])
    return torch.cat(found)


def scored(model: Any, batch: Batch, passes: list[Rows]) -> Tensor:
    scorer = Scorer(model)
    found = torch.zeros(batch.token_count())
    for rows in passes:
        found = found.index_put((rows.index,), scorer(rows)[0])
    return found


def gradients(model: Any, log_pi: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weight = torch.linspace(-1, 1, len(log_pi))
    (log_pi * weight).sum().backward()  # type: ignore[no-untyped-call]
    # An expert that no token chose has no gradient here and a gradient of zeros there.
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad.clone()
        for name, value in model.named_parameters()
    }


@pytest.mark.parametrize("name", list(SUPPORTED))
def test_log_probabilities_and_gradients_are_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    model = save_random(SUPPORTED[name], tmp_path, seed=2, scale=0.2)
    expected = row_by_row(model, BATCH)
    expected_gradients = gradients(model, expected)
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        for passes in (lay_out(BATCH, "padded"), lay_out(BATCH, "packed"), lay_out(BATCH, "flat")):
            found = scored(model, BATCH, passes)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            for parameter, gradient in gradients(model, found).items():
                largest = float(expected_gradients[parameter].abs().max())
                torch.testing.assert_close(
                    gradient,
                    expected_gradients[parameter],
                    atol=1e-5 * max(1.0, largest),
                    rtol=0,
                    msg=f"the gradient of {parameter}",
                )


def test_capped_scores_need_an_attention_that_caps(tmp_path: Path) -> None:
    model = save_random(transformers.Gemma2Config(**SIZES, head_dim=16), tmp_path, seed=2)
    model.set_attn_implementation("sdpa")
    with pytest.raises(UserError, match="sdpa cannot cap scores as this model does; choose eager"):
        Scorer(model)


def test_the_routers_auxiliary_loss_is_off(tmp_path: Path) -> None:
    model = save_random(SUPPORTED["qwen3-moe"], tmp_path, seed=2)
    passes = lay_out(BATCH, "padded")
    expected = gradients(model, scored(model, BATCH, passes))
    model.config.output_router_logits = True
    for name, found in gradients(model, scored(model, BATCH, passes)).items():
        assert torch.equal(found, expected[name])


def test_a_head_in_16_bits_gives_logits_in_fp32(tmp_path: Path) -> None:
    """As the engine computes them; logits rounded to 16 bits are off by up to 0.1 nat and more."""
    save_random(SUPPORTED["qwen2"], tmp_path, seed=2)
    model = load(tmp_path, torch.bfloat16)
    passes = lay_out(BATCH, "padded")
    found = scored(model, BATCH, passes)
    hidden: list[Tensor] = []
    model.base_model.register_forward_hook(lambda *call: hidden.append(call[2].last_hidden_state))
    with torch.no_grad():
        again = scored(model, BATCH, passes)
    assert torch.equal(again, found)
    head = model.get_output_embeddings().weight.double()
    for rows, states in zip(passes, hidden, strict=True):
        logits = states.flatten(0, 1)[rows.predictor].double() @ head.t() / TEMPERATURE
        exact = torch.log_softmax(logits, -1).gather(-1, rows.target[:, None])[:, 0]
        torch.testing.assert_close(
            found[rows.index].double(), exact[rows.source], atol=1e-5, rtol=0
        )
    for name, gradient in gradients(model, found).items():
        assert gradient.dtype == torch.bfloat16 and gradient.isfinite().all(), name


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3-moe"])
def test_a_model_started_without_weights_equals_a_loaded_one(name: str, tmp_path: Path) -> None:
    """Its buffers too, and its experts, which are stored one by one."""
    save_random(SUPPORTED[name], tmp_path, seed=2)
    loaded, started = load(tmp_path), blank(tmp_path, torch.float32)
    for (at, ours), (_, theirs) in zip(
        started.named_buffers(), loaded.named_buffers(), strict=True
    ):
        assert torch.equal(ours, theirs), at
    stored = StoredWeights(tmp_path)
    for at, parameter in loaded.named_parameters():
        assert stored.shapes[at] == tuple(parameter.shape)
        for slices in (slices_of(parameter), (slice(1, 3),), (slice(2, 2),)):
            assert torch.equal(stored.part(at, slices), parameter[slices]), at
