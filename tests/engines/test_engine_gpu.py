"""The native engine on a GPU. `make test-gpu` runs it; no GPU has run it yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peers.engines import cache
from peers.engines.batch import generate
from peers.engines.device import available_bytes, find_device, find_dtype, upload
from peers.engines.engine import Engine
from peers.engines.graphs import StaticStep, layout_of
from peers.engines.native import NativeEngine
from peers.engines.noise_kernel import TOLERANCE, make_kernel, noise_kernel
from peers.engines.sampling import gumbel_noise, keyed_noise, noise_by_torch
from peers.proofs import toploc
from tests.engines.conformance import BF16, Conformance, Tolerance, drain, requests
from tests.engines.harness import complete, prefill_completions
from tests.engines.test_noise_kernel import hashed_words

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
]

Policies = Callable[[str], list[Path]]

FP32_GPU = Tolerance(margin=1e-3, log_probability=1e-3, hidden=0.01, same_tokens=True)

FAMILIES = ("qwen2-tied", "qwen2", "gemma2", "mistral-window")


class TestCuda(Conformance):
    tolerance = FP32_GPU
    families = FAMILIES

    def make(self, folder: Path, policy: int = 0) -> Engine:
        return NativeEngine(folder, "cuda", torch.float32, policy)


class TestCudaWithoutGraphs(Conformance):
    tolerance = FP32_GPU
    families = (*FAMILIES, "qwen3-moe")

    def make(self, folder: Path, policy: int = 0) -> Engine:
        return NativeEngine(folder, "cuda", torch.float32, policy, cuda_graphs=False)


class TestCudaBf16(Conformance):
    tolerance = BF16
    families = FAMILIES

    def make(self, folder: Path, policy: int = 0) -> Engine:
        return NativeEngine(folder, "cuda", torch.bfloat16, policy)


class TestCudaBf16WithoutGraphs(Conformance):
    tolerance = BF16

    def make(self, folder: Path, policy: int = 0) -> Engine:
        return NativeEngine(folder, "cuda", torch.bfloat16, policy, cuda_graphs=False)


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
def test_the_kernels_noise_is_that_of_a_cpu(size: int) -> None:
    """Words bit for bit; after two logarithms, to the tolerance."""
    kernel = noise_kernel(torch.device("cuda", 0), noise_by_torch)
    assert kernel is not None, "Triton is missing, fails or disagrees"
    keys = torch.tensor([(0xFFFFFFFF, 0x80000001), (0, 1), (2**31, 16), (7, 8)])
    rows = torch.tensor([0, 3, 2**20, 2**31])
    positions = torch.tensor([0, 7, 2**16 + 1, 2**31 + 5])
    given = (keys, rows, positions)
    moved = [each.cuda() for each in given]
    words = make_kernel(words=True)(moved[0], moved[1], moved[2], size)
    assert torch.equal(words.cpu(), hashed_words(*given, size))
    expected = noise_by_torch(*given, size)
    for found in (keyed_noise(moved[0], moved[1], moved[2], size),
                  noise_by_torch(moved[0], moved[1], moved[2], size)):  # fmt: skip
        torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE, rtol=0)
    one = gumbel_noise((7, 8), moved[1], moved[2], size)
    torch.testing.assert_close(
        one.cpu(), gumbel_noise((7, 8), rows, positions, size), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_are_recorded_and_agree_with_steps_run_as_they_are(
    policies: Policies, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "COLUMNS_MIN", 8)
    folder = policies(family)[0]
    asked = [replace(each, stop_ids=()) for each in requests(limit=30)]
    graphed = NativeEngine(folder, "cuda", torch.float32)
    plain = NativeEngine(folder, "cuda", torch.float32, cuda_graphs=False)
    for _ in range(2):
        for one, other in zip(generate(graphed, asked), generate(plain, asked), strict=True):
            assert one.tokens == other.tokens
            torch.testing.assert_close(
                one.log_probabilities, other.log_probabilities, atol=1e-4, rtol=0
            )
    assert graphed._graphs.recording and graphed._graphs.replays > 20
    assert plain._graphs.replays == 0


def test_graphs_outlive_a_swap(policies: Policies) -> None:
    for family in FAMILIES[:2]:
        old, new = policies(family)
        engine = NativeEngine(old, "cuda", torch.float32)
        asked = [replace(each, stop_ids=()) for each in requests(limit=20)]
        generate(engine, asked)
        generate(engine, asked)
        captures = engine._graphs.captures
        engine.load_weights(new, 1)
        found = generate(engine, asked)
        fresh = NativeEngine(new, "cuda", torch.float32, cuda_graphs=False)
        assert [each.tokens for each in found] == [each.tokens for each in generate(fresh, asked)]
        assert engine._graphs.captures == captures


def test_graphs_go_when_memory_moves(policies: Policies) -> None:
    engine = NativeEngine(policies("qwen2")[0], "cuda", torch.float32)
    asked = [replace(each, stop_ids=()) for each in requests(limit=20)]
    first = [each.tokens for each in generate(engine, asked)]
    for _ in range(3):
        assert engine._rows.free_memory()
        torch.cuda.empty_cache()
        assert [each.tokens for each in generate(engine, asked)] == first


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
    """Neither an ordinary pass nor a static step; only the tokens that come back are awaited."""
    engine = NativeEngine(policies("qwen2")[0], "cuda", dtype, cuda_graphs=False)
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
            _, hidden = engine._advance(admitted)
            logits = engine.logits(hidden)
        assert bool(torch.isfinite(logits).all())
        buckets = [bucket for bucket in rows.cache.buckets if bucket.rows]
        step = StaticStep(engine._decoder, layout_of(buckets), buckets, engine._entries_max)
        step.fill()
        step()
        with never_waiting():
            step.fill()
            step()
        assert len(step.read()) == len(rows.live)


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


def test_a_cancelled_row_does_not_disturb_a_graph(policies: Policies) -> None:
    engine = NativeEngine(policies("qwen2")[0], "cuda", torch.float32)
    asked = [replace(each, stop_ids=()) for each in requests(limit=20)]
    whole = generate(engine, asked)
    for request in asked:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    engine.cancel(2)
    found = drain(engine)
    assert sorted(found) == [0, 1, 3, 4, 5]
    assert all(found[id].tokens == whole[id].tokens for id in found)
