"""Adapters: merged, unmerged and peft's own agree; broken and hostile ones get a sentence each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from peers.engines.adapter import WEIGHTS_FILE, stored_name
from peers.engines.adapter_config import CONFIG_FILE, base_of, is_adapter
from peers.engines.device import DTYPES
from peers.engines.loading import load
from peers.engines.memory import need_of
from peers.engines.model import merged_folder, read_weights
from peers.engines.native import NativeEngine
from peers.engines.registry import make_engine
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.shardcast.manifest import BASE_NAME
from tests.engines.adapters import ATTENTION, change_config, save_random_adapter
from tests.engines.harness import complete, prefill_completions

PROMPTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
Policies = Callable[[str], list[Path]]

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama-tied": {"targets": ("q_proj", "v_proj", "down_proj")},
    "qwen3-moe": {"targets": ATTENTION},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_and_unmerged_engines_agree(family: str, policies: Policies, tmp_path: Path) -> None:
    base, _ = policies(family)
    folder = save_random_adapter(base, tmp_path / "adapter", **FAMILIES[family])
    safetensors.torch.save_file(read_weights(folder), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    engines = [
        NativeEngine(tmp_path),  # a whole model with the sum of both
        NativeEngine(folder),
        NativeEngine(folder, merge=False),
    ]
    whole, merged, unmerged = (
        complete(each, PROMPTS, range(3), (1, 2), 1.0, [49], 8) for each in engines
    )
    plain = complete(NativeEngine(base), PROMPTS, range(3), (1, 2), 1.0, [49], 8)
    assert whole.tokens == merged.tokens == unmerged.tokens != plain.tokens
    for ours, theirs in zip(merged.log_probabilities, unmerged.log_probabilities, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    states = prefill_completions(engines[2], PROMPTS, merged.tokens).hidden
    for ours, theirs in zip(merged.hidden, states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)  # bf16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_keeps_what_a_small_adapter_learned(
    dtype: str, policies: Policies, tmp_path: Path
) -> None:
    """Of a base in bf16, as models are published: its rounding is as large as an early adapter."""
    base = tmp_path / "base"
    shutil.copytree(policies("qwen2")[0], base)
    weights = {name: value.bfloat16() for name, value in read_weights(base).items()}
    safetensors.torch.save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    folder = save_random_adapter(base, tmp_path / "adapter", size=0.003)
    exact = NativeEngine(folder, dtype=DTYPES[dtype], merge=False)
    usual = make_engine("native", folder, Hardware(dtype=dtype))
    rounded = NativeEngine(folder, dtype=torch.bfloat16, merge=True)
    texts = [[5, 6, 7, 8] * 4, [9, 4, 9, 4] * 4]
    ours, default, lost = (
        torch.cat(prefill_completions(each, PROMPTS[:2], texts).hidden).float()
        for each in (exact, usual, rounded)
    )
    assert float((ours - default).abs().max()) <= (0 if dtype == "bfloat16" else 0.01)
    assert float((ours - lost).abs().mean()) > 4 * float((ours - default).abs().mean())


@pytest.mark.parametrize("merge", [True, False])
def test_swaps_between_base_and_adapters_leave_no_trace(
    merge: bool, policies: Policies, tmp_path: Path
) -> None:
    base, _ = policies("qwen2")
    first, second = (
        save_random_adapter(base, tmp_path / str(seed), seed=seed, targets=targets)
        for seed, targets in ((1, ATTENTION), (2, ("down_proj",)))
    )
    engine = NativeEngine(first, merge=merge)
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    weights = safetensors.torch.load_file(base / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.mlp.down_proj.weight"):
        some = {each: value for each, value in weights.items() if each != name}
        safetensors.torch.save_file(some, broken / "model.safetensors")
        with pytest.raises(UserError, match=name):
            engine.load_weights(broken, 1)
    halved = {name: value / 2 for name, value in weights.items()}
    safetensors.torch.save_file(halved, broken / "model.safetensors")  # mended, in its old place
    for step, folder in enumerate((broken, second, base, first)):
        engine.load_weights(folder, step)
        swapped = complete(engine, PROMPTS, range(3), (1, 2), 1.0, [49], 8)
        fresh = complete(NativeEngine(folder, merge=merge), PROMPTS, range(3), (1, 2), 1.0, [49], 8)
        assert swapped.tokens == fresh.tokens
        assert all(map(torch.equal, swapped.hidden, fresh.hidden))


def test_a_merged_adapter_is_what_peft_merges(policies: Policies, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="pip install 'swarm-rl[peft]'")
    base, _ = policies("qwen2")
    folder = save_random_adapter(base, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(load(base), folder).merge_and_unload().state_dict()
    ours = read_weights(folder)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-6)
    again = tmp_path / "theirs"
    peft.PeftModel.from_pretrained(load(base), folder).save_pretrained(again)
    change_config(again, base_model_name_or_path=str(base))
    (again / "config.json").write_bytes((base / "config.json").read_bytes())
    assert all(torch.equal(weight, ours[name]) for name, weight in read_weights(again).items())


def test_a_sum_in_16_bits_is_rounded_once(policies: Policies, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(policies("qwen2")[0], base)
    weights = {name: value.bfloat16() for name, value in read_weights(base).items()}
    safetensors.torch.save_file(weights, base / "model.safetensors")
    folder = save_random_adapter(base, tmp_path / "adapter", dtype=torch.bfloat16)
    tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    name = "model.layers.1.mlp.down_proj"
    a, b = (tensors[stored_name(name, each)].double() for each in "AB")
    exact = weights[f"{name}.weight"].double() + 2.0 * (b @ a)
    found = read_weights(folder)[f"{name}.weight"]
    assert torch.equal(found, exact.float().bfloat16())
    with merged_folder(folder, torch.bfloat16) as whole:  # as vLLM reads it
        assert whole != folder and not is_adapter(whole)
        assert torch.equal(read_weights(whole)[f"{name}.weight"], found)
    with merged_folder(folder, torch.float32) as whole:
        torch.testing.assert_close(read_weights(whole)[f"{name}.weight"], exact.float())
    assert not whole.exists()
    with merged_folder(base, torch.float32) as whole:
        assert whole == base


def test_an_adapter_needs_the_memory_of_its_base(policies: Policies, tmp_path: Path) -> None:
    base, _ = policies("qwen2")
    folder = save_random_adapter(base, tmp_path / "adapter")
    assert need_of(folder, Hardware(), 16) == need_of(base, Hardware(), 16)


def test_the_base_of_a_fetched_adapter_is_the_one_fetched_with_it(
    policies: Policies, tmp_path: Path
) -> None:
    base, other = policies("qwen2")
    folder = save_random_adapter(base, tmp_path / "0-3")
    (folder / BASE_NAME).write_text("../0-0")
    with pytest.raises(UserError, match=r"its base \.\./0-0 is no folder with a whole model"):
        base_of(folder)
    shutil.copytree(other, tmp_path / "0-0")
    assert base_of(folder).resolve() == (tmp_path / "0-0").resolve()


def test_a_base_link_that_is_no_text_is_one_sentence(policies: Policies, tmp_path: Path) -> None:
    folder = save_random_adapter(policies("qwen2")[0], tmp_path / "0-3")
    (folder / BASE_NAME).write_bytes(b"../\xff")
    with pytest.raises(UserError, match=r"0-3/\.base is not text; delete it"):
        base_of(folder)


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_a_merged_model_without_room_is_one_sentence(
    free: int, policies: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether that is known before, or writing fails."""
    folder = save_random_adapter(policies("qwen2")[0], tmp_path / "adapter")

    def disk_usage(aside: Path) -> SimpleNamespace:
        (aside / "config.json").mkdir()  # a file of this name cannot be written
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with (
        pytest.raises(UserError, match=r"adapter could not be merged in .*: set TMPDIR"),
        merged_folder(folder, torch.float32),
    ):
        raise AssertionError


# --- broken and hostile adapters -------------------------------------------------------------


def _tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / WEIGHTS_FILE)


NAME = stored_name("model.layers.0.self_attn.q_proj", "A")


def _break(folder: Path, how: str) -> None:
    weights = folder / WEIGHTS_FILE
    match how:
        case "nan":
            _tensors(folder, lambda tensors: tensors[NAME].fill_(float("nan")))
        case "shape":
            _tensors(folder, lambda tensors: tensors.update({NAME: torch.zeros(3, 31)}))
        case "dtype":
            _tensors(folder, lambda tensors: tensors.update({NAME: tensors[NAME].int()}))
        case "lacks":
            _tensors(folder, lambda tensors: tensors.pop(NAME))
        case "more":
            _tensors(folder, lambda tensors: tensors.update(head=torch.zeros(1)))
        case "pickle":
            weights.rename(folder / "adapter_model.bin")
        case "no file":
            weights.unlink()
        case "huge":
            with weights.open("r+b") as file:
                file.truncate(1 << 40)  # sparse
        case "not safetensors":
            weights.write_bytes(b"\xff" * 100)
        case "not json":
            (folder / CONFIG_FILE).write_text("[" * 100_000)
        case "long config":
            (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "x" * (1 << 21)}))
        case "no object":
            (folder / CONFIG_FILE).write_text("[]")


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("nan", "holds NaN or infinity; the adapter is broken"),
        ("shape", r"is F32 \[3, 31\], not \[3, 32\] in F32, F16 or BF16"),
        ("dtype", r"is I32 \[3, 32\], not \[3, 32\] in F32, F16 or BF16"),
        ("lacks", "lacks .*q_proj.lora_A.weight; the adapter is of another base"),
        ("more", "holds 'head', which its adapter_config.json does not name"),
        ("pickle", "holds a pickled adapter .* which is refused because it can run code"),
        ("no file", "cannot be read"),
        ("huge", r"has 1099511627776 bytes; an adapter of this rank for this base has at most"),
        ("not safetensors", "is no safetensors file"),
        ("not json", "is not JSON"),
        ("long config", "has more than 1048576 bytes"),
        ("no object", "is not a JSON object"),
    ],
)
def test_a_broken_adapter_is_refused(
    how: str, sentence: str, policies: Policies, tmp_path: Path
) -> None:
    folder = save_random_adapter(policies("qwen2")[0], tmp_path / "adapter")
    engine = NativeEngine(folder)
    before = complete(engine, PROMPTS, range(3), None, 1.0, [49], 4).tokens
    _break(folder, how)
    with pytest.raises(UserError, match=sentence):
        engine.load_weights(folder, 1)
    assert complete(engine, PROMPTS, range(3), None, 1.0, [49], 4).tokens == before


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"r": 10_000}, "r is 10000; it must be 1 to 512"),
        ({"r": True}, "r is True; it must be 1 to 512"),
        ({"r": 4}, r"not \[4, 48\] in F32, F16 or BF16; the adapter is of another base or rank"),
        ({"lora_alpha": 0}, "lora_alpha is 0; it must be above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan; it must be above 0"),
        ({"target_modules": ["head"]}, "target_modules names 'head'; there are: q_proj, k_proj"),
        ({"target_modules": []}, r"target_modules names \[\]; there are: q_proj"),
        ({"target_modules": "all-linear"}, "target_modules names 'all-linear'; there are:"),
        ({"target_modules": [["q_proj"]]}, "target_modules names"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; it must be 'LORA'"),
        ({"use_dora": True}, "use_dora is True, which changes what the adapter computes"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern is .* which changes what"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', so the adapter belongs to"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', so the"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora', so the adapter belongs to"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is .* which changes what"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is .* which changes what"),
        ({"use_tomorrows_lora": True}, "use_tomorrows_lora is True, which changes what"),
        ({"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}, "its base Qwen/Qwen2.5-0.5B is no"),
        ({"base_model_name_or_path": "\0"}, "is no folder with a whole model"),
        ({"base_model_name_or_path": "x" * 5000}, "is no folder with a whole model"),
        ({"base_model_name_or_path": 7}, "its base 7 is no folder with a whole model"),
    ],
)
def test_a_wrong_config_is_refused(
    fields: dict[str, Any], sentence: str, policies: Policies, tmp_path: Path
) -> None:
    folder = save_random_adapter(policies("qwen2")[0], tmp_path / "adapter")
    change_config(folder, **fields)
    with pytest.raises(UserError, match=sentence):
        NativeEngine(folder)


def test_an_adapter_of_another_base_is_refused(policies: Policies, tmp_path: Path) -> None:
    folder = save_random_adapter(policies("qwen2")[0], tmp_path / "adapter")
    (moe, _) = policies("qwen3-moe")
    change_config(folder, base_model_name_or_path=str(moe))
    (folder / "config.json").write_bytes((moe / "config.json").read_bytes())
    with pytest.raises(UserError, match="adapts down_proj, which no layer of its base has"):
        NativeEngine(folder)


def test_an_adapter_is_no_whole_model_for_transformers(policies: Policies, tmp_path: Path) -> None:
    folder = save_random_adapter(policies("qwen2")[0], tmp_path / "adapter")
    with pytest.raises(UserError, match="holds an adapter, not a whole model"):
        load(folder)


def test_an_adapter_as_peft_saves_it_is_plain(policies: Policies, tmp_path: Path) -> None:
    """All options that peft 0.19 writes, at the values of a plain LoRA."""
    folder = save_random_adapter(policies("qwen2")[0], tmp_path / "adapter")
    off = ("arrow_config", "corda_config", "eva_config", "exclude_modules", "megatron_config")
    change_config(
        folder,
        **dict.fromkeys((*off, "layer_replication", "modules_to_save", "use_bdlora", "revision")),
        **{"init_lora_weights": True, "loftq_config": {}, "rank_pattern": {}, "lora_bias": False},
        **{"megatron_core": "megatron.core", "qalora_group_size": 16, "peft_version": "0.19.0"},
        **{"task_type": "CAUSAL_LM", "lora_dropout": 0.05, "inference_mode": True},
    )
    NativeEngine(folder)
