"""The parts of the vLLM engine that need no vLLM: arguments, stored weights, the check."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from peers.engines.config import read_config
from peers.engines.native import NativeEngine
from peers.engines.registry import make_engine
from peers.engines.vllm.check import LIMITS, Agreement, check_engine_agrees
from peers.engines.vllm.engine import CPU_CACHE_BYTES_MIN, engine_arguments
from peers.engines.vllm.selftest import make_tiny
from peers.inference.settings import InferenceSettings
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.settings import PeerSettings
from tests.attacks.weights import fp8

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return folder


def test_an_engine_with_the_same_weights_agrees(tiny: Path) -> None:
    found = check_engine_agrees(NativeEngine(tiny), tiny)
    assert found is not None
    # fp32 against itself: the hidden states are exact up to the order of sums before rounding.
    assert found.hidden < 5e-3 and found.log_probability < 1e-4 and found.margin == 0


def test_an_engine_with_other_weights_is_refused_with_the_figures(
    tiny: Path, tmp_path: Path
) -> None:
    make_tiny(tmp_path, seed=1)
    sentence = (
        r"native 0\.\S+ computes other values .* on cpu in float32: hidden states .*; at most"
    )
    with pytest.raises(UserError, match=sentence):
        check_engine_agrees(NativeEngine(tmp_path), tiny)


def test_bf16_is_within_its_own_limits_but_not_those_of_fp32(tiny: Path) -> None:
    found = check_engine_agrees(NativeEngine(tiny, "cpu", torch.bfloat16), tiny)
    assert found is not None and not found.within(LIMITS["float32"])


def test_weights_that_are_rounded_do_not_agree(tiny: Path, tmp_path: Path) -> None:
    rounded = shutil.copytree(tiny, tmp_path / "rounded")
    stored = safetensors.torch.load_file(tiny / "model.safetensors")
    weights = {
        name: fp8(name, weight) if weight.ndim == 2 and "embed" not in name else weight
        for name, weight in stored.items()
    }
    safetensors.torch.save_file(weights, rounded / "model.safetensors")
    with pytest.raises(UserError, match="on cpu in bfloat16: "):
        check_engine_agrees(NativeEngine(rounded, "cpu", torch.bfloat16), tiny)


def test_nan_is_no_agreement() -> None:
    nan = float("nan")
    for broken in (Agreement(nan, 0, 0), Agreement(0, nan, 0), Agreement(0, 0, nan)):
        assert not broken.within(LIMITS["bfloat16"])


def test_a_settings_table_reaches_vllms_arguments(tiny: Path) -> None:
    table = {
        "device": "cpu",
        "memory_share": 0.5,
        "slots": 8,
        "length_max": 128,
        "tensor_parallel": 2,
        "pipeline_parallel": 3,
        "cuda_graphs": True,
    }
    settings = PeerSettings(tables={"inference": table}).of("inference", InferenceSettings)
    model = read_config(tiny)
    cuda = torch.device("cuda")
    made = engine_arguments(tiny, model, cuda, torch.bfloat16, settings.hardware)
    assert made["gpu_memory_utilization"] == 0.5
    assert (made["max_num_seqs"], made["max_model_len"]) == (8, 128)
    assert (made["tensor_parallel_size"], made["pipeline_parallel_size"]) == (2, 3)
    assert made["enforce_eager"] is False and made["dtype"] == "bfloat16"
    assert made["quantization"] is None
    assert "kv_cache_memory_bytes" not in made, "vLLM measures a GPU's memory itself"

    default = engine_arguments(tiny, model, cuda, torch.bfloat16, Hardware())
    assert default["enforce_eager"] is True and "max_num_seqs" not in default
    assert default["max_model_len"] == 256
    for name in ("quantization", "speculative_config"):
        assert default[name] is None
    assert default["hf_overrides"] == {"head_dtype": "float32"}


def test_the_cache_on_a_cpu_has_a_bound(tiny: Path) -> None:
    model = read_config(tiny)

    def cache(hardware: Hardware) -> int:
        arguments = engine_arguments(tiny, model, CPU, torch.float32, hardware)
        assert arguments["enforce_eager"] is True
        return int(arguments["kv_cache_memory_bytes"])

    assert cache(Hardware()) == CPU_CACHE_BYTES_MIN, "64 rows of 256 tokens are 17 MB"
    long = {**model, "max_position_embeddings": 1 << 20, "num_hidden_layers": 64}
    free = engine_arguments(tiny, long, CPU, torch.float32, Hardware(memory_share=1e-6))
    assert free["kv_cache_memory_bytes"] == CPU_CACHE_BYTES_MIN


@pytest.mark.parametrize(("kind", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_quantised_weights_are_refused(
    kind: torch.dtype, name: str, tiny: Path, tmp_path: Path
) -> None:
    weights = safetensors.torch.load_file(tiny / "model.safetensors")
    norm = "model.norm.weight"
    folder = shutil.copytree(tiny, tmp_path / "quantised")
    safetensors.torch.save_file(
        weights | {norm: weights[norm].to(kind)}, folder / "model.safetensors"
    )
    with pytest.raises(UserError, match=f"{norm} in .* is stored as {name}; quantised"):
        make_engine("native", folder)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_child_without_vllm_says_what_installs_it(tiny: Path) -> None:
    with pytest.raises(UserError, match="type: swarm engine install vllm"):
        make_engine("vllm", tiny)
