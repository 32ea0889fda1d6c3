"""A trainer starts without weights, and each rank reads its own part of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peers.engines.loading import blank
from peers.engines.loading import load as load_model
from peers.engines.model import read_weights
from peers.learning.host import PAGE_BYTES
from peers.learning.learner import Learner
from peers.learning.live import LiveMemory
from peers.learning.ranks import Ranks
from peers.learning.sharding import local, whole
from peers.learning.stored import StoredPart, StoredWeights
from swarm.errors import UserError
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_learner import SETTINGS, random_groups, settings, teach


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """An untied bf16 model whose sizes two ranks cannot halve, with scaled rotary frequencies."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=36,
        intermediate_size=45,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=12,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
        dtype=torch.bfloat16,
    )
    folder = tmp_path_factory.mktemp("uneven") / "policy"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (base / name).exists():
            shutil.copyfile(base / name, folder / name)
    return folder


@pytest.mark.parametrize("which", ["base", "uneven"])
def test_a_blank_model_is_the_loaded_one_without_weights(
    request: pytest.FixtureRequest, which: str
) -> None:
    folder: Path = request.getfixturevalue(which)
    model, expected = blank(folder, torch.float32), load_model(folder)
    assert all(parameter.is_meta for parameter in model.parameters())
    shapes = {name: value.shape for name, value in model.named_parameters()}
    assert shapes == {name: value.shape for name, value in expected.named_parameters()}
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(expected.named_buffers()).keys()
    for name, value in expected.named_buffers():
        assert torch.equal(buffers[name], value) and buffers[name].dtype == value.dtype
    assert model.dtype == expected.dtype
    assert model.config.to_diff_dict() == expected.config.to_diff_dict()


def test_without_a_dtype_in_its_config_the_stored_dtype_counts(
    uneven: Path, tmp_path: Path
) -> None:
    shutil.copytree(uneven, tmp_path / "policy")
    path = tmp_path / "policy" / "config.json"
    config = json.loads(path.read_text())
    del config["dtype"]
    path.write_text(json.dumps(config))
    learner = Learner(tmp_path / "policy", SETTINGS)
    assert learner.policy.published_dtype == load_model(tmp_path / "policy").dtype == torch.bfloat16


def test_the_learner_begins_with_the_bases_weights(uneven: Path) -> None:
    learner = Learner(uneven, settings(kl_coefficient=0.1))
    stored = read_weights(uneven)
    assert {name: value.dtype for name, value in learner.model.named_parameters()} == (
        dict.fromkeys(stored, torch.float32)
    )
    for name, value in learner.model.named_parameters():
        assert torch.equal(value, stored[name].float())
        assert torch.equal(learner.past.held[0][name], stored[name])
        assert learner.past.reference and torch.equal(learner.past.reference[name], stored[name])


def test_two_ranks_read_every_byte_once(
    uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, and again for an older policy after a resume."""
    size = sum(value.nbytes for value in read_weights(uneven).values())

    def work(ranks: Ranks) -> list[Any]:
        opened = []
        begin = StoredWeights.__init__

        def noted(self: StoredWeights, folder: Path) -> None:
            begin(self, folder)
            opened.append(self)

        monkeypatch.setattr(StoredWeights, "__init__", noted)
        learner = Learner(uneven, SETTINGS, ranks=ranks)
        learner.export(tmp_path / "policy-0")
        start = sum(each.bytes_read for each in opened)
        teach(learner, random_groups(0, policy=0), 0)
        learner.save(tmp_path / "state")
        opened.clear()
        learner.load(tmp_path / "state", {0: tmp_path / "policy-0"})
        again = sum(each.bytes_read for each in opened)
        held = learner.past.held[0]
        weights = {name: whole(value.detach()) for name, value in learner.model.named_parameters()}
        return [start, again, {name: value.clone() for name, value in held.items()}, weights]

    first, second = run_ranks(2, tmp_path, work)
    assert first[0] + second[0] == first[1] + second[1] == size
    assert max(first[0], second[0]) < 0.6 * size
    stored = read_weights(uneven)
    for name, value in stored.items():
        assert torch.equal(torch.cat([first[2][name], second[2][name]]), value)
        assert torch.equal(first[3][name], second[3][name])
        assert not torch.equal(first[3][name], value.float())  # it has learnt


def test_a_part_outlives_its_folder(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "policy")
    expected = read_weights(base)
    part = StoredPart(StoredWeights(tmp_path / "policy"), expected, torch.float32)
    shutil.rmtree(tmp_path / "policy")
    assert len(part) == len(expected)
    assert all(torch.equal(part[name], expected[name]) for name in part)


def test_weights_that_do_not_fit_their_config_are_a_sentence(uneven: Path, tmp_path: Path) -> None:
    shutil.copytree(uneven, tmp_path / "policy")
    for path in (tmp_path / "policy").glob("*.safetensors*"):
        path.unlink()
    weights = read_weights(uneven)
    del weights["model.norm.weight"]
    safetensors.torch.save_file(weights, tmp_path / "policy" / "model.safetensors")
    with pytest.raises(UserError, match=r"lack model\.norm\.weight, which a model with"):
        Learner(tmp_path / "policy", SETTINGS)
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="is no safetensors file"):
        Learner(tmp_path / "policy", SETTINGS)


@pytest.mark.parametrize("world", [1, 2])
def test_a_start_never_holds_more_than_a_ranks_part(
    uneven: Path, tmp_path: Path, world: int
) -> None:
    """Weights and spare model in fp32, policy 0 in bf16, and one tensor on its way."""

    def work(ranks: Ranks) -> tuple[int, int]:
        with LiveMemory() as live:
            learner = Learner(uneven, SETTINGS, ranks=ranks)
        mine = sum(local(value).numel() for value in learner.model.parameters())
        return live.peak, mine

    largest = max(value.nbytes for value in read_weights(uneven).values())
    for peak, mine in run_ranks(world, tmp_path, work):
        assert mine * (4 + 2) < peak <= mine * (4 + 4 + 2) + 2 * (largest + PAGE_BYTES)
