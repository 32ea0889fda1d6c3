"""Ranks that share the tokens of every sequence compute what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from peers.engines.loading import load
from peers.learning.learner import Learner
from peers.learning.packing import lay_out
from peers.learning.ranks import Ranks
from peers.learning.sequence_parallel import share
from peers.learning.sharding import whole
from swarm.errors import UserError
from swarm.jobs.training import Sharding
from swarm.wire.manifest import Adapter
from tests.engines.test_general import FAMILIES, MORE
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_general_families import base_of, chosen
from tests.trainer.test_packing import varlen_attention
from tests.trainer.test_scored_families import BATCH, gradients, row_by_row
from tests.trainer.test_sharded import close, everything, learn

REFUSED = {
    **dict.fromkeys(
        ("nemotron", "stablelm"), "ValueError: their layers hand no arguments on to attention"
    ),
    "bloom": "their attention has masks of its own",
    **dict.fromkeys(
        ("falcon_h1", "nemotron_h", "qwen3_next"), "they have convolutions over the tokens"
    ),
}

FLASH = "flash_attention_promised"
"""A stand-in for the kernel for packed rows, which needs a GPU."""

UNEVEN = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
"""Neither 2 nor 4 divides these heads, which are SmolLM2's."""


def shares_what_one_scores(family: str, folder: Path, world: int = 2, **changes: Any) -> None:
    """In every layout: log-probabilities and gradients."""
    AttentionInterface.register(FLASH, varlen_attention)
    base = base_of(family, folder / "base", **changes)
    model = load(base, torch.float32).eval()
    expected = row_by_row(model, BATCH)
    wanted = gradients(model, expected)

    def work(ranks: Ranks) -> str:
        try:
            learner = Learner(base, chosen(sharding=Sharding(sequence_parallel=world)), ranks=ranks)
        except UserError as error:
            return str(error)
        scorer = learner.policy.scorer
        flat = [scorer.place(rows, ranks.device) for rows in lay_out(BATCH, "flat")]
        for kernel, passes in (
            (scorer._kernel, learner.policy.passes(BATCH)),
            (scorer._kernel, flat if scorer.packs else []),
            (FLASH, flat if family == "llama" else []),
        ):
            if not passes:
                continue
            scorer._kernel = kernel
            learner.model.zero_grad()
            scored = torch.zeros(BATCH.token_count())
            for rows in passes:
                assert rows.whole is not None
                assert rows.tokens.shape[1] * world == rows.whole.tokens.shape[1]
                scored = scored.index_put((rows.index,), scorer(rows)[0])
            torch.testing.assert_close(scored, expected, atol=1e-5, rtol=1e-5)
            for name, gradient in gradients(learner.model, scored).items():
                most = 3e-5 * max(1.0, float(wanted[name].abs().max()))
                torch.testing.assert_close(
                    whole(gradient), wanted[name], atol=most, rtol=0, msg=name
                )
        return ""

    for said in run_ranks(world, folder, work):
        if family not in REFUSED:
            assert not said
        else:
            assert f"trained with trainer.sequence_parallel, so omit it ({REFUSED[family]})" in said


@pytest.mark.parametrize("family", ["phi3", "qwen3_next"])
def test_two_ranks_share_the_tokens_of_a_family(family: str, tmp_path: Path) -> None:
    shares_what_one_scores(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*FAMILIES, *MORE} - {"phi3", "qwen3_next"}))
def test_two_ranks_share_the_tokens_of_more_families(family: str, tmp_path: Path) -> None:
    shares_what_one_scores(family, tmp_path)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_heads_that_the_ranks_do_not_divide_are_shared(world: int, tmp_path: Path) -> None:
    shares_what_one_scores("llama", tmp_path, world, **UNEVEN)


@pytest.mark.slow
def test_two_ranks_train_adapters_together(tmp_path: Path) -> None:
    """In their step the reference and an older policy are scored by the policy itself."""
    base = base_of("llama", tmp_path / "base", **UNEVEN)
    adapter = Adapter(rank=4, alpha=8.0)
    alone = Learner(base, chosen(adapter=adapter))
    expected = learn(alone, range(3))

    def work(ranks: Ranks) -> Any:
        how = Sharding(sequence_parallel=2, activation_checkpointing=True)
        learner = Learner(base, chosen(adapter=adapter, sharding=how), ranks=ranks)
        return learn(learner, range(3)), everything(learner)[0]

    for metrics, weights in run_ranks(2, tmp_path, work):
        for found, wanted in zip(metrics, expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)
        assert close(weights, everything(alone)[0])


def test_a_share_has_every_so_many_th_token_and_equally_many_results() -> None:
    for rows in lay_out(BATCH, "flat", 50):
        shares = [share(rows, rank, 3) for rank in range(3)]
        tokens = torch.stack([each.tokens for each in shares], -1).flatten(1)
        assert torch.equal(tokens[:, : rows.tokens.shape[1]], rows.tokens)
        found = torch.cat([each.target for each in shares])
        before = torch.cat([each.tokens.flatten()[each.predictor] for each in shares])
        assert torch.equal(found[shares[1].source], rows.target[rows.source])
        assert torch.equal(before[shares[2].source], rows.tokens[0][rows.predictor][rows.source])
        assert shares[0].whole is not None and int(shares[0].whole.starts[-1]) == tokens.shape[1]


@pytest.mark.slow
def test_what_cannot_be_shared_is_one_sentence(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")

    def refused(ranks: Ranks) -> list[str]:
        said = []
        for how in (
            Sharding(sequence_parallel=2),
            Sharding(sequence_parallel=3, tensor_parallel=3),
            Sharding(sequence_parallel=3, compile=True),
        ):
            with pytest.raises(UserError) as caught:
                Learner(base, chosen(sharding=how), ranks=ranks)
            said.append(str(caught.value))
        return said

    assert run_ranks(3, tmp_path, refused)[2] == [
        "trainer.sequence_parallel is 2, which does not divide the 3 ranks",
        "trainer.tensor_parallel cannot be used with trainer.sequence_parallel; omit one",
        "trainer.compile cannot be used with trainer.sequence_parallel; omit one",
    ]
