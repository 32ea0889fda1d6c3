"""The native engine conforms, in each precision, with little memory, and for unusual families."""

from __future__ import annotations

from pathlib import Path

import torch

from peers.engines.engine import Engine
from peers.engines.native import NativeEngine
from tests.engines.conformance import BF16, Conformance


class TestNative(Conformance):
    families = ("qwen2-tied", "qwen2", "mistral-window", "qwen3-moe")

    def make(self, folder: Path, policy: int = 0) -> Engine:
        return NativeEngine(folder, policy=policy)


class TestNativeBf16(Conformance):
    tolerance = BF16

    def make(self, folder: Path, policy: int = 0) -> Engine:
        return NativeEngine(folder, dtype=torch.bfloat16, policy=policy)


class TestNativeWithFewSlots(Conformance):
    """Rows wait for slots, and groups are admitted in parts."""

    def make(self, folder: Path, policy: int = 0) -> Engine:
        return NativeEngine(folder, policy=policy, slots=3)


class TestNativeWithLittleMemory(Conformance):
    """Rows give way to others, and copies are dropped."""

    def make(self, folder: Path, policy: int = 0) -> Engine:
        engine = NativeEngine(folder, policy=policy)
        engine._rows.cache.bytes_max = int(4.5 * engine._rows.cache.row_bytes(64))
        return engine
