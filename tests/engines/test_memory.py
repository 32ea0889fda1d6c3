from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peers.engines.cache import Shape
from peers.engines.decoder import Decoder
from peers.engines.memory import Need, check_fits, need_of
from swarm.errors import UserError
from swarm.jobs import Hardware
from tests.engines.families import SUPPORTED, save_random

GB = 10**9


def held_bytes(part: Any, seen: set[int]) -> int:
    """Bytes of all tensors that an object holds, each storage once."""
    if isinstance(part, Tensor) and part.is_mkldnn:  # packed: it has no storage to look at
        return part.numel() * part.element_size()
    if isinstance(part, Tensor):
        storage = part.untyped_storage()
        fresh = storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return storage.nbytes() if fresh else 0
    if isinstance(part, list | tuple):
        return sum(held_bytes(each, seen) for each in part)
    return sum(held_bytes(each, seen) for each in getattr(part, "__dict__", {}).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3-moe", "llama-tied"])
def test_the_figures_are_those_of_the_engine(tmp_path: Path, family: str, dtype: str) -> None:
    save_random(SUPPORTED[family], tmp_path, seed=1)
    need = need_of(tmp_path, Hardware(device="cpu", dtype=dtype), 10_000)
    decoder = Decoder(tmp_path, "cpu", getattr(torch, dtype))
    held = held_bytes([decoder._embedding_and_head, decoder._stages], set())
    assert need.weights_bytes == pytest.approx(held, rel=0.02)  # rotary tables, norms in fp32
    shape = Shape.of(decoder.model, decoder.dtype, decoder.layer_devices)
    assert need.length == decoder.model.length_max
    assert need.row_bytes == need.length * shape.position_bytes
    split = Hardware(device="cpu", dtype=dtype, devices=["cpu", "cpu"])
    assert need_of(tmp_path, split).weights_bytes == need.weights_bytes // 2


def need(weights: int, row: int, length: int = 100) -> Need:
    return Need(
        device="cpu", dtype="float32", weights_bytes=weights * GB, length=length, row_bytes=row * GB
    )


def test_a_policy_that_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(
        UserError, match=r"4.0 GB in float32 and the cache .* 1.0 GB, but 3.0 GB are"
    ):
        check_fits(need(4, 1), 3 * GB)
    with pytest.raises(UserError, match=r"4.0 GB in float32, but 3.0 GB are free, 1.0 GB too few;"):
        check_fits(need(4, 0, length=0), 3 * GB)
    check_fits(need(1, 1), 2 * GB)
