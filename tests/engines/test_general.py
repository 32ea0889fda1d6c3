"""The general engine: transformers' own module, for families that the native engine refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from peers.engines.engine import Engine, Request
from peers.engines.general import GeneralEngine
from peers.engines.loading import load_policy as load
from peers.engines.memory import position_bytes
from peers.engines.registry import make_engine
from swarm.errors import UserError
from tests.engines.conformance import Conformance, drain

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
_LATENT = {
    **_ROUTED,
    "head_dim": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_LINEAR = {
    **_EXPERTS,
    "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

_FALCON = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_NEMOTRON = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "n_groups": 1,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {},
    "phi3": {},
    "qwen3_next": _LINEAR,
}
"""Families in the default suite, and what their small configs need besides `SMALL`."""

MORE: dict[str, dict[str, Any]] = {
    "apertus": {}, "arcee": {}, "bloom": {}, "cohere": {}, "cohere2": {}, "deepseek_v2": _LATENT,
    "ernie4_5": {}, "exaone4": {}, "falcon_h1": _FALCON, "gemma": {}, "gemma2": {},
    "gemma3_text": {}, "glm": {}, "glm4": {}, "glm4_moe": {**_ROUTED, "first_k_dense_replace": 1},
    "gpt2": {}, "gpt_neox": {}, "granite": {}, "granitemoe": {}, "helium": {},
    "hunyuan_v1_dense": {}, "llama": {}, "mistral": {}, "mixtral": {}, "nemotron": {},
    "nemotron_h": _NEMOTRON, "olmo": {}, "olmo2": {}, "olmo3": {}, "persimmon": {}, "phi": {},
    "qwen2": {}, "qwen2_moe": _EXPERTS, "qwen3": {}, "qwen3_moe": _EXPERTS, "seed_oss": {},
    "smollm3": {}, "stablelm": {}, "starcoder2": {},
}  # fmt: skip


def policy_of(family: str, folder: Path, **changes: Any) -> Path:
    """A small policy of a family, with random weights."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    given = {**SMALL, **{**FAMILIES, **MORE}.get(family, {}), **changes}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**given)).save_pretrained(folder)
    return folder


class TestGeneral(Conformance):
    def make(self, folder: Path, policy: int = 0) -> Engine:
        return GeneralEngine(folder, policy=policy)


def generates_what_one_pass_gives(family: str, folder: Path) -> None:
    engine = GeneralEngine(policy_of(family, folder))
    prompts = [[5, 6, 7, 8], [5, 6, 7, 9], [10, 11]]
    for row, prompt in enumerate(prompts):
        engine.submit(Request(row, prompt, row, (1, 2), 1.0, (2,), 12))
    pieces = drain(engine)
    whole = [[*prompt, *pieces[row].tokens] for row, prompt in enumerate(prompts)]
    sampled = [list(range(len(p), len(w))) for p, w in zip(prompts, whole, strict=True)]
    prefill = engine.prefill(whole, sampled)
    for row, states in enumerate(prefill.states):
        piece = pieces[row]
        likely = torch.log_softmax(engine.logits(states), -1)
        own = likely.gather(-1, torch.tensor(piece.tokens)[:, None])[:, 0]
        torch.testing.assert_close(own, piece.log_probabilities, atol=1e-5, rtol=0)
        torch.testing.assert_close(prefill.hidden[row], piece.hidden, atol=0.02, rtol=0.02)
    # And what transformers itself says of the same tokens.
    said = load(folder, None)(input_ids=torch.tensor([whole[0]])).logits[0, 3:-1].float()
    torch.testing.assert_close(engine.logits(prefill.states[0]), said, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_generates_what_one_pass_gives(family: str, tmp_path: Path) -> None:
    generates_what_one_pass_gives(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", MORE)
def test_more_families_generate_what_one_pass_gives(family: str, tmp_path: Path) -> None:
    generates_what_one_pass_gives(family, tmp_path)


def test_a_family_that_generates_something_else_is_refused_with_the_figure(tmp_path: Path) -> None:
    folder = policy_of("mamba2", tmp_path, num_heads=8, state_size=16, n_groups=1)
    with pytest.raises(UserError, match=r"generates other tokens one by one .*[(]by 0\.\d+ nats"):
        GeneralEngine(folder)


@pytest.fixture
def phi(tmp_path: Path) -> Path:
    return policy_of("phi3", tmp_path / "phi")


def _say(folder: Path, **changes: Any) -> Path:
    """Change what a folder's config.json says."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def _hold(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Change tensors of a folder; None: they are gone."""
    path = folder / "model.safetensors"
    weights = {**safetensors.torch.load_file(path), **changes}
    kept = {name: value for name, value in weights.items() if value is not None}
    safetensors.torch.save_file(kept, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 6}, "lack model.layers.4.* and 11 more"),
        ({"model_type": "bert"}, "the weights in .* lack bert"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a whole"),
        ({"layer_types": [2000]}, "layer_types is .2000.; it must be a whole number of at most"),
        ({"vision_config": {"depth": 10**6}}, "depth is 1000000; it must be a whole number of at"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "is quantised"),
        ({"is_encoder_decoder": True}, "has an encoder beside its decoder"),
        (
            {
                "original_max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [4.0] * 8,
                },
            },
            "of the type longrope: from position 64 on",
        ),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0; it must be a whole"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be a whole"),
        ({"vocab_size": "x"}, "cannot be loaded by transformers .*expected int, got str"),
        ({"model_type": ["phi3"]}, "cannot be loaded by transformers"),
        ({"hidden_size": 10**9}, r"takes [\d.]+ TB of memory, and .* are free"),
        ({"dtype": "float64"}, "is stored as float64; set dtype to"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
        ({"attn_implementation": "someone/kernel"}, r"its own programs [(]attn_implementation"),
        (
            {"model_type": "new", "text_config": {"auto_map": {"AutoConfig": "x.Y"}}},
            r"its own programs [(]auto_map",
        ),
    ],
)
def test_a_config_that_lies_is_one_sentence(
    phi: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        GeneralEngine(_say(phi, **changes))


def test_weights_that_are_not_whole_are_one_sentence(phi: Path) -> None:
    engine = GeneralEngine(phi)
    _hold(phi, **{"lm_head.weight": torch.full((128, 64), torch.nan)})
    with pytest.raises(UserError, match="logits that are not numbers; its weights are broken"):
        GeneralEngine(phi)
    _hold(phi, **{"lm_head.weight": None})
    with pytest.raises(UserError, match=r"lack lm_head\.weight"):
        GeneralEngine(phi)
    with pytest.raises(UserError, match=r"lack lm_head\.weight"):  # nor made up for a new policy
        engine.load_weights(phi, 2)
    (phi / "model.safetensors").write_bytes((10**11).to_bytes(8, "little") + b"{}")
    with pytest.raises(UserError, match="is no safetensors file"):
        GeneralEngine(phi)


def test_pickles_adapters_and_files_outside_the_folder_are_never_read(phi: Path) -> None:
    outside = (phi / "model.safetensors").rename(phi.parent / "outside.safetensors")
    torch.save(safetensors.torch.load_file(outside), phi / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled weights"):
        GeneralEngine(phi)
    names = dict.fromkeys(safetensors.torch.load_file(outside), "../outside.safetensors")
    index = phi / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(UserError, match="which is no safetensors file beside it"):
        GeneralEngine(phi)
    index.unlink()
    outside.rename(phi / "model.safetensors")
    (phi / "adapter_config.json").write_text('{"base_model_name_or_path": ".."}')
    with pytest.raises(UserError, match="peft_type is None"):
        GeneralEngine(phi)


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}],
)
def test_a_policy_of_another_model_is_refused_before_it_is_loaded(
    phi: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    engine = GeneralEngine(phi)
    other = policy_of("phi3", tmp_path / "other", **changes)
    with pytest.raises(UserError, match="another model than the one loaded"):
        engine.load_weights(other, 1)


@pytest.mark.parametrize(
    ("said", "across"),
    [
        ({}, 64),
        ({"num_attention_heads": [4, 8], "num_key_value_heads": [2, 4]}, 64),
        ({"num_attention_heads": 4, "num_key_value_heads": [2, 4]}, 64),
        ({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": None}, 32),
    ],
)
def test_memory_is_planned_whatever_a_config_says_of_heads(
    said: dict[str, Any], across: int
) -> None:
    config = {"num_hidden_layers": 3, "hidden_size": 64, **said}
    assert position_bytes(config, torch.float32) == 2 * 3 * across * 4


@pytest.mark.parametrize("family", ["bart", "opt", "rwkv"])
def test_a_family_that_cannot_generate_here_is_one_sentence(family: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot generate here"):
        GeneralEngine(policy_of(family, tmp_path))


def test_programs_in_the_folder_of_a_known_family_are_not_looked_at(phi: Path) -> None:
    """As in the published Phi 3, whose family transformers has since."""
    (phi / "x.py").write_text("raise SystemExit")
    GeneralEngine(_say(phi, auto_map={"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"}))


@pytest.mark.parametrize("said", [[], {}, 7, None, "no-such-family"])
def test_a_family_of_any_value_is_refused_in_a_sentence(said: object, tmp_path: Path) -> None:
    config = json.loads((policy_of("llama", tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": said}))
    with pytest.raises(UserError, match="cannot be loaded by transformers"):
        make_engine("native", tmp_path)
