"""Families that only transformers knows: scored, trained, sharded, adapted, published, read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from peers.engines.demo import save_tokenizer
from peers.engines.general import GeneralEngine
from peers.engines.loading import load
from peers.engines.model import weight_files
from peers.environments.prompt_room import ModelFacts
from peers.learning.learner import Learner
from peers.learning.ranks import Ranks
from peers.learning.settings import LearnerSettings
from swarm.errors import UserError
from swarm.jobs.training import Sharding
from swarm.wire.manifest import Adapter
from tests.engines.test_general import FAMILIES, MORE, SMALL, policy_of
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_adapters import engine_sees_what_the_learner_scores
from tests.trainer.test_learner import random_groups, settings, teach
from tests.trainer.test_scored_families import BATCH, gradients, row_by_row
from tests.trainer.test_sharded import close, everything, learn

PADDED = frozenset({"bloom", "falcon_h1", "gpt_oss", "nemotron_h", "qwen3_next"})
"""Families whose packed rows would see each other, most by a recurrent layer."""


def base_of(family: str, folder: Path, **changes: Any) -> Path:
    policy_of(family, folder, **changes)
    save_tokenizer(folder)
    return folder


def chosen(**changes: Any) -> LearnerSettings:
    fields = {name: changes.pop(name) for name in ("adapter", "sharding") if name in changes}
    return dataclasses.replace(settings(optimiser_steps=2, kl_coefficient=0.01), **fields)


def stored_names(folder: Path) -> set[str]:
    return {name for path in weight_files(folder) for name in safetensors.torch.load_file(path)}


def learns_what_engines_see(family: str, tmp_path: Path) -> None:
    base = base_of(family, tmp_path / "base")
    learner = Learner(base, chosen())
    assert learner.policy.scorer.packs == (family not in PADDED)
    # As scored by transformers, each sequence alone.
    model = load(base, torch.float32).eval()
    expected = row_by_row(model, BATCH)
    passes = learner.policy.passes(BATCH)
    torch.testing.assert_close(learner.policy.score(passes), expected, atol=1e-5, rtol=1e-5)
    wanted = gradients(model, expected)
    scored = torch.zeros(BATCH.token_count())
    for rows in passes:
        scored = scored.index_put((rows.index,), learner.policy.scorer(rows)[0])
    for name, gradient in gradients(learner.model, scored).items():
        largest = max(1.0, float(wanted[name].abs().max()))
        torch.testing.assert_close(gradient, wanted[name], atol=3e-5 * largest, rtol=0, msg=name)
    learner.model.zero_grad()

    teach(learner, random_groups(0, policy=0), 0, ["0"])
    learner.export(tmp_path / "policy")
    assert stored_names(tmp_path / "policy") == stored_names(base)
    engine_sees_what_the_learner_scores(GeneralEngine(tmp_path / "policy"), learner)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_learns_what_engines_see(family: str, tmp_path: Path) -> None:
    learns_what_engines_see(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", MORE)
def test_more_families_learn_what_engines_see(family: str, tmp_path: Path) -> None:
    learns_what_engines_see(family, tmp_path)


@pytest.mark.parametrize(
    "family", ["qwen3_next", *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES)]
)
def test_two_ranks_learn_what_one_learns(family: str, tmp_path: Path) -> None:
    base = base_of(family, tmp_path / "base")
    alone = Learner(base, chosen())
    learn(alone, range(2))
    expected, _ = everything(alone)

    def work(ranks: Ranks) -> dict[str, torch.Tensor]:
        learner = Learner(
            base, chosen(sharding=Sharding(activation_checkpointing=True)), ranks=ranks
        )
        learn(learner, range(2))
        learner.export(tmp_path / "policy")
        return everything(learner)[0]

    for weights in run_ranks(2, tmp_path, work):
        assert close(weights, expected, 5e-5)
    assert stored_names(tmp_path / "policy") == stored_names(base)
    loaded = {name: each.detach() for name, each in load(tmp_path / "policy").named_parameters()}
    assert close(loaded, expected, 5e-5)


def test_adapters_are_merged_by_the_engine(tmp_path: Path) -> None:
    base = base_of("gpt_oss", tmp_path / "base")
    adapter = Adapter(rank=4, alpha=8.0, targets=["q_proj", "o_proj"])
    learner = Learner(base, chosen(adapter=adapter))
    teach(learner, random_groups(0, policy=0), 0, ["0"])
    learner.export(tmp_path / "policy")
    assert not (tmp_path / "policy" / "model.safetensors").exists()
    config = tmp_path / "policy" / "adapter_config.json"
    config.write_text(config.read_text().replace('"base"', f'"{base}"'))
    engine_sees_what_the_learner_scores(GeneralEngine(tmp_path / "policy"), learner)
    with pytest.raises(UserError, match=r"adapter.targets names gate_proj, which no layer"):
        Learner(base, chosen(adapter=Adapter(rank=4)))


def multimodal(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A small model that sees images, of a family that has no class for text alone."""
    from transformers import AutoModelForImageTextToText, Qwen3VLConfig

    eyes = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8,
        "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    ids = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122}
    text = {**SMALL, "num_hidden_layers": 2, "rope_parameters": rope, **changes}
    torch.manual_seed(0)
    config = Qwen3VLConfig(text_config=text, vision_config=eyes, vision_end_token_id=123, **ids)
    AutoModelForImageTextToText.from_config(config, dtype=dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def alone() -> Iterator[None]:
    """Ends the process group that a single process makes for mixed precision."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("half", [False, True])
def test_the_text_part_of_a_model_that_sees_is_trained(half: bool, tmp_path: Path) -> None:
    base = multimodal(tmp_path / "base", torch.bfloat16 if half else torch.float32)
    learner = Learner(base, chosen(sharding=Sharding(mixed_precision=half)))
    assert {each.dtype for each in learner.policy.trained().values()} == {torch.float32}
    if not half:
        expected = row_by_row(load(base).eval(), BATCH)
        found = learner.policy.score(learner.policy.passes(BATCH))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    learn(learner, range(2))  # the second step scores with a past policy
    learner.export(tmp_path / "policy")
    before, after = (
        safetensors.torch.load_file(each / "model.safetensors")
        for each in (base, tmp_path / "policy")
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (".visual." in name), name
    engine = GeneralEngine(base)
    engine.load_weights(tmp_path / "policy", 2)


@pytest.mark.parametrize("family", ["bart", "gemma3n_text", "llama4_text"])
def test_a_family_that_cannot_be_trained_is_one_sentence(family: str, tmp_path: Path) -> None:
    sizes = {
        "bart": {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1},
        "gemma3n_text": {
            "num_kv_shared_layers": 0,
            "laurel_rank": 8,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
        },
    }.get(family, {})
    with pytest.raises(UserError, match=r"cannot be trained here|nor trained here"):
        Learner(base_of(family, tmp_path / "base", **sizes), chosen())


def test_what_a_config_says_of_answers_does_not_end_a_trainer(tmp_path: Path) -> None:
    base = base_of("phi3", tmp_path / "base")
    config = base / "config.json"
    config.write_text(config.read_text().replace("{", '{"return_dict": false,', 1))
    with pytest.raises(UserError, match=r"family phi3 cannot be trained here [(]AttributeError"):
        Learner(base, chosen())


def test_attention_in_chunks_is_never_packed(tmp_path: Path) -> None:
    """transformers counts them from a row's start, not from a sequence's."""
    base = base_of("phi3", tmp_path / "base")
    config = base / "config.json"
    config.write_text(config.read_text().replace("{", '{"attention_chunk_size": 8192,', 1))
    assert not Learner(base, chosen()).policy.scorer.packs


def test_prompts_have_the_room_that_a_model_says_in_its_text_part(tmp_path: Path) -> None:
    facts = ModelFacts.read(multimodal(tmp_path))
    assert (facts.vocab_size, facts.max_position_embeddings) == (128, 256)


def test_a_head_that_is_stored_and_tied_to_another_embedding_is_refused(tmp_path: Path) -> None:
    """transformers, and so each engine, leaves both as they are."""
    base = base_of("phi3", tmp_path / "base")
    config = base / "config.json"
    config.write_text(
        config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    with pytest.raises(UserError, match=r"tie_word_embeddings.; set that to false"):
        Learner(base, chosen())


def test_engines_cap_the_scores_that_a_trainer_caps(tmp_path: Path) -> None:
    """transformers' own choice, sdpa, would leave the cap out without a word."""
    base = base_of("vaultgemma", tmp_path / "base", attn_logit_softcapping=0.01)
    learner = Learner(base, chosen())
    found = learner.policy.score(learner.policy.passes(BATCH))
    torch.testing.assert_close(found, row_by_row(load(base).eval(), BATCH), atol=1e-5, rtol=0)
