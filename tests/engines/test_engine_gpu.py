"""The native engine on a GPU. `make test-gpu` runs it; no GPU has run it yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peers.engines.device import available_bytes, find_device, find_dtype, upload
from peers.engines.engine import Engine
from peers.engines.native import NativeEngine
from peers.engines.noise import gumbel_noise
from peers.proofs import toploc
from tests.engines.conformance import BF16, Conformance, Tolerance, requests
from tests.engines.harness import complete, prefill_completions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
]

Policies = Callable[[str], list[Path]]

FP32_GPU = Tolerance(margin=1e-3, log_probability=1e-3, hidden=0.01, same_tokens=True)

NOISE_TOLERANCE = 1e-4
"""Largest difference between two devices. Noise has the scale 1; thresholds begin at 2e-4."""

FAMILIES = ("qwen2-tied", "qwen2", "mistral-window")


class TestCuda(Conformance):
    tolerance = FP32_GPU
    families = (*FAMILIES, "qwen3-moe")

    def make(self, folder: Path, policy: int = 0) -> Engine:
        return NativeEngine(folder, "cuda", torch.float32, policy)


class TestCudaBf16(Conformance):
    tolerance = BF16
    families = FAMILIES

    def make(self, folder: Path, policy: int = 0) -> Engine:
        return NativeEngine(folder, "cuda", torch.bfloat16, policy)


@contextmanager
def never_waiting() -> Iterator[None]:
    """Raise when the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_auto_takes_the_gpu() -> None:
    device = find_device("auto")
    assert device.type == "cuda"
    capable = torch.cuda.get_device_capability(device) >= (8, 0)
    assert find_dtype("auto", device) is (torch.bfloat16 if capable else torch.float32)
    assert 0 < available_bytes(device) <= torch.cuda.get_device_properties(0).total_memory


@pytest.mark.parametrize("size", [1, 5, 1026, 40_000, 151_936])
def test_the_noise_is_that_of_a_cpu(size: int) -> None:
    """After two logarithms, to the tolerance."""
    rows = torch.tensor([0, 3, 2**20, 2**31])
    positions = torch.tensor([0, 7, 2**16 + 1, 2**31 + 5])
    for key in ((0xFFFFFFFF, 0x80000001), (0, 1), (2**31, 16), (7, 8)):
        found = gumbel_noise(key, rows.cuda(), positions.cuda(), size)
        expected = gumbel_noise(key, rows, positions, size)
        torch.testing.assert_close(found.cpu(), expected, atol=NOISE_TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_equals_decoding_and_the_cpu(policies: Policies, dtype: torch.dtype) -> None:
    folder = policies("qwen2")[0]
    engine, cpu = NativeEngine(folder, "cuda", dtype), NativeEngine(folder, "cpu", torch.float32)
    prompts = [[1, 5, 9], [3], list(range(1, 20))] * 3
    made = complete(engine, prompts, range(9), (7, 8), 1.0, (), 24)
    found = prefill_completions(engine, prompts, made.tokens)
    truth = prefill_completions(cpu, prompts, made.tokens)
    loose = dtype == torch.bfloat16
    for piece, states, true in zip(made, found.states, truth.states, strict=True):
        near = 0.05 if loose else 1e-4
        assert float((states.float().cpu() - true).norm() / true.norm()) < near
        decoded = piece.hidden.float().cpu()
        assert float((decoded - states.float().cpu()).norm() / true.norm()) < max(near, 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_pass_waits_for_the_device(policies: Policies, dtype: torch.dtype) -> None:
    """Only the tokens that come back are awaited."""
    engine = NativeEngine(policies("qwen2")[0], "cuda", dtype)
    asked = [replace(each, stop_ids=()) for each in requests(limit=20)]
    for request in asked:
        engine.submit(request)
    with torch.inference_mode():
        for _ in range(4):
            engine.step()
        rows = engine._rows
        admitted = rows.admit(0)
        engine._advance(admitted)  # warm: kernels are compiled, memory is allocated
        with never_waiting():
            *_, hidden = engine._advance(admitted)
            logits = engine.logits(hidden)
        assert bool(torch.isfinite(logits).all())


def test_proofs_built_on_the_gpu_are_accepted_on_a_cpu(policies: Policies) -> None:
    folder = policies("qwen2")[0]
    engine, cpu = NativeEngine(folder, "cuda", torch.bfloat16), NativeEngine(folder)
    prompts = [list(range(1, 30))] * 8
    made = complete(engine, prompts, range(8), (7, 8), 1.0, (), 30)
    truth = prefill_completions(cpu, prompts, made.tokens)
    for piece, hidden, before in zip(made, truth.hidden, truth.prompt_hidden, strict=True):
        proofs = toploc.build(toploc.chunk_rows(piece.prompt_hidden, piece.hidden))
        results = toploc.verify(toploc.chunk_rows(before, hidden), proofs)
        assert all(result.accepted for result in results)


def test_uploaded_numbers_are_not_overwritten_before_they_arrive() -> None:
    """Page-locked memory is used again only after the copies from it."""
    device = torch.device("cuda", 0)
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(20):
        busy = busy @ busy * 1e-3
    sent = [upload([number] * 4096, device) for number in range(200)]
    assert [int(each.sum()) for each in sent] == [4096 * number for number in range(200)]
