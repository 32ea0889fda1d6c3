"""A model whose layers are shared by several devices generates what one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from peers.engines import prefill
from peers.engines.cache import Bucket, Shape
from peers.engines.decoder import Decoder, split_layers
from peers.engines.engine import Engine
from peers.engines.flat import FlatAttention, Fresh, Part
from peers.engines.native import NativeEngine
from peers.engines.prefill import Prefiller
from peers.engines.registry import make_engine
from peers.inference.settings import InferenceSettings
from peers.validator.role import ValidatorSettings
from swarm.errors import UserError
from tests.engines.conformance import Conformance
from tests.engines.families import SUPPORTED, save_random
from tests.engines.harness import complete, prefill_completions

PROMPTS = [[1, 5, 9], [3], [7, 7, 2, 40, 41, 42, 8, 11, 12, 49], [1, 5, 9], [11, 12], [2] * 20]
CPU = torch.device("cpu")


class TestTwoDevices(Conformance):
    def make(self, folder: Path, policy: int = 0) -> Engine:
        return NativeEngine(folder, policy=policy, devices=[CPU, CPU])


@pytest.mark.parametrize("name", ["llama-yarn", "qwen2-window", "qwen3-moe"])
def test_the_settings_split_every_kind_of_layer(name: str, tmp_path: Path) -> None:
    save_random(SUPPORTED[name], tmp_path, seed=1)
    settings = InferenceSettings(devices=["cpu", "cpu"])
    judging = ValidatorSettings(devices=["cpu", "cpu"])
    assert judging.hardware == msgspec.structs.replace(
        settings.hardware, memory_share=judging.hardware.memory_share
    )
    split: Any = make_engine("native", tmp_path, settings.hardware)
    assert [len(each._layers) for each in split._decoder._stages] == [2, 2]
    whole = NativeEngine(tmp_path)
    ours, theirs = (
        complete(each, PROMPTS, [4, 0, 9, 5, 2, 7], (1, 2), 0.8, [0, 3], 14)
        for each in (split, whole)
    )
    assert ours.tokens == theirs.tokens
    again, wanted = (prefill_completions(each, PROMPTS, ours.tokens) for each in (split, whole))
    for mine, other in zip(again.states, wanted.states, strict=True):
        assert torch.equal(split.logits(mine), whole.logits(other))


def test_layers_are_split_evenly(tmp_path: Path) -> None:
    assert split_layers(10, 3) == [range(4), range(4, 7), range(7, 10)]
    with pytest.raises(UserError, match="5 devices cannot share 4 layers"):
        split_layers(4, 5)
    save_random(SUPPORTED["llama"], tmp_path, seed=1)
    with pytest.raises(UserError, match="is not on this machine"):
        make_engine("native", tmp_path, InferenceSettings(devices=["cuda:7"]).hardware)


def test_every_tensor_is_on_the_device_of_its_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device `meta`, which computes nothing but refuses tensors of another device."""
    save_random(SUPPORTED["qwen2-window"], tmp_path, seed=1)
    both = [CPU, torch.device("meta")]
    decoder = Decoder(tmp_path, devices=both)
    # What has come from `meta` cannot leave it: the first layers get zeros.
    embedded = torch.zeros(1, 5, decoder.model.hidden_size)
    monkeypatch.setattr(decoder._embedding_and_head, "embed", lambda _: embedded.clone())
    bucket: Bucket[Any] = Bucket(
        Shape.of(decoder.model, decoder.dtype, decoder.layer_devices), columns=64
    )
    bucket.resize(3)
    assert [each.device for each in bucket.keys] == decoder.layer_devices
    part = Part(bucket, 0, [0, 1, 2, 2, 2], [5, 8, 0, 1, 2], 2, [Fresh(2, 1, 3)])
    positions = torch.tensor([part.positions])
    attention = FlatAttention([part], decoder.model.kv_heads, decoder.dtype)
    with torch.inference_mode():
        hidden = decoder.forward(positions, positions, attention, 9)[0]
        attention.write_states(hidden)
        bucket.share([0], [1], 4)
        assert decoder.logits(hidden).device == both[1]
        monkeypatch.setattr(prefill, "upload", lambda *_: torch.zeros(2, 5, dtype=torch.int64))
        found = Prefiller(decoder)._forward(prefill._lay([prefill._Row(0, [1] * 5, [5])], 9))
        assert found.device == both[1]
