"""vLLM conforms, in fp32 and bf16; judged by the native engine, since it does not prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peers.engines.engine import Engine, Prefill
from peers.engines.native import NativeEngine
from peers.engines.vllm.engine import VllmEngine
from peers.engines.vllm.selftest import make_tiny
from swarm.jobs import Hardware
from tests.engines.conformance import BF16, Conformance

pytestmark = pytest.mark.vllm

HARDWARE = {dtype: Hardware(device="cpu", dtype=dtype) for dtype in ("float32", "bfloat16")}


class JudgedVllm(VllmEngine):
    """vLLM, with the native engine's prefill of the same policy."""

    def __init__(self, folder: Path, policy: int, hardware: Hardware) -> None:
        super().__init__(folder, policy, hardware)
        self._judge(folder)

    def load_weights(self, folder: Path, policy: int) -> None:
        super().load_weights(folder, policy)
        self._judge(folder)

    def _judge(self, folder: Path) -> None:
        dtype = getattr(torch, self.capabilities.dtype)
        self._native = NativeEngine(folder, dtype=dtype)

    def prefill(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
    ) -> Prefill:
        found = self._native.prefill(sequences, sampled)
        # No proof of its models needs the rows before a completion, and it gives none.
        return dataclasses.replace(found, prompt_hidden=[rows[:0] for rows in found.prompt_hidden])

    def logits(self, states: Tensor) -> Tensor:
        return self._native.logits(states)


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """Like the fixture of that name for all engines, with heads that vLLM takes on a CPU."""
    made: dict[str, list[Path]] = {}

    def of(family: str) -> list[Path]:
        if family not in made:
            made[family] = [tmp_path_factory.mktemp(family) for _ in range(2)]
            for seed, folder in enumerate(made[family]):
                make_tiny(folder, seed, tied=family.endswith("tied"))
        return made[family]

    return of


class TestVllm(Conformance):
    """Two engines per kind of head, since starting one takes seconds."""

    dtype = "float32"
    engines: dict[tuple[str, bool], list[JudgedVllm]] = {}  # noqa: RUF012 (of all tests)

    def make(self, folder: Path, policy: int = 0) -> Engine:
        tied = "tied" in folder.name
        some = self.engines.setdefault((self.dtype, tied), [])
        if len(some) < 2:
            some.append(JudgedVllm(folder, policy, HARDWARE[self.dtype]))
            return some[-1]
        engine = some.pop(0)
        some.append(engine)
        for id in list(engine._live):
            engine.cancel(id)
        engine.load_weights(folder, policy)
        return engine


class TestVllmBf16(TestVllm):
    dtype = "bfloat16"
    tolerance = BF16
