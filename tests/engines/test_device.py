from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peers.engines.demo import make_policy
from peers.engines.device import (
    available_bytes,
    find_device,
    find_dtype,
    title_of,
    unused_gpu,
    use_hardware,
)
from peers.engines.registry import make_engine
from swarm.errors import UserError
from swarm.jobs import Hardware

CUDA = torch.cuda.is_available()


def test_auto_takes_what_the_machine_has() -> None:
    device = find_device("auto")
    assert device.type == ("cuda" if CUDA else "cpu")
    assert CUDA or find_dtype("auto", device) is torch.float32


def test_a_cpu_computes_in_bf16_where_a_run_measured_thresholds_for_it() -> None:
    cpu, flags = torch.device("cpu"), Path("/proc/cpuinfo").read_text(encoding="utf-8")
    has_products = " amx_bf16 " in flags or " avx512_bf16 " in flags
    half = torch.bfloat16 if has_products else torch.float32
    auto = Hardware()
    assert find_dtype(auto.in_run(["bfloat16", "float32"]).dtype, cpu) is half
    assert auto.in_run(["float32"]) == auto.in_run([]) == auto
    chosen = Hardware(dtype="float32")
    assert chosen.in_run(["bfloat16"]) == chosen


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "", "CPU"])
def test_an_unknown_device_names_those_there_are(name: str) -> None:
    with pytest.raises(UserError, match=f"device '{name}' is not on this machine; there are: cpu"):
        use_hardware(Hardware(device=name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_computes_in_the_precision_asked_for(tmp_path_factory, dtype: str) -> None:
    folder = tmp_path_factory.mktemp("policy")
    make_policy(folder, seed=0)
    engine = make_engine("native", folder, Hardware(device="cpu", dtype=dtype))
    prefill = engine.prefill([[1, 4, 5]], [[1, 2]])
    assert prefill.states[0].dtype is getattr(torch, dtype)


@pytest.mark.skipif(CUDA, reason="this machine has a GPU")
def test_no_gpu_though_one_was_asked_for_says_why() -> None:
    with pytest.raises(UserError, match=r"there are: cpu \(.+\)$"):
        find_device("cuda")
    cpu = torch.device("cpu")
    assert unused_gpu(cpu, ["/nothing"]) == ""
    assert unused_gpu(cpu, ["/dev/null"]).startswith("this machine has a GPU that is not used: ")


def test_a_cpu_has_a_name_and_memory() -> None:
    cpu = torch.device("cpu")
    assert title_of(cpu)
    assert available_bytes(cpu) > 0
