"""Layers compiled by torch.compile compute what the others do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
import trio
from torch._inductor import config as inductor

from peers.engines.loading import load
from peers.learning.packing import lay_out
from peers.learning.ranks import Ranks
from peers.learning.scorer import Scorer
from peers.learning.sharding import check_compiler, shard
from peers.trainer.service import TrainerService
from swarm.errors import UserError
from swarm.jobs.training import Sharding
from tests.engines.families import SIZES, save_random
from tests.trainer.test_packing import spread_batch
from tests.trainer.test_scored_families import gradients, scored
from tests.trainer.test_service import start


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # those that torch.compile itself causes
def test_compiled_layers_equal_the_others_to_1e_5(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**SIZES | {"num_hidden_layers": 1}, head_dim=16)
    save_random(config, tmp_path, seed=2, scale=0.2)
    batch = spread_batch(3, count=6, longest=20)
    passes = lay_out(batch, "padded", tokens_max=40)
    assert len({rows.tokens.shape for rows in passes}) > 1
    found = []
    for compiled in (False, True):
        model = load(tmp_path).float().eval()
        model.set_attn_implementation("sdpa")
        shard(Scorer(model), model.model.layers, Ranks(), Sharding(compile=compiled))
        log_pi = scored(model, batch, passes)
        found.append((log_pi.detach(), gradients(model, log_pi)))
    (plain, expected), (compiled_pi, compiled_gradients) = found
    torch.testing.assert_close(compiled_pi, plain, atol=1e-5, rtol=0)
    for name, gradient in compiled_gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)


def test_without_a_compiler_it_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiler(torch.device("cpu"))
    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))
    job = start(base, sharding=Sharding(compile=True))
    with pytest.raises(UserError, match=r"trainer\.compile: no C\+\+ compiler was found"):
        trio.run(TrainerService().start, job)
