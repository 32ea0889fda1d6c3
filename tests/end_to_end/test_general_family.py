"""A run with a family that only transformers knows: linear attention and experts (Qwen3-Next)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trio

from peers.demo.recipes import ENVIRONMENT, Warmup
from peers.demo.warmup import warm_up
from peers.engines.demo import VOCABULARY, save_tokenizer
from peers.engines.loading import load as load_model
from peers.environments import load
from tests.end_to_end.harness import STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts
from tests.engines.test_general import policy_of

STEPS = 3


@pytest.mark.slow
def test_real_peers_train_a_family_that_is_not_described(tmp_path: Path, fork_server: Path) -> None:
    torch.set_num_threads(1)
    base = tmp_path / "base"
    policy_of("qwen3_next", base, vocab_size=len(VOCABULARY))
    save_tokenizer(base)
    warm_up(base, [load(ENVIRONMENT.name, ENVIRONMENT.version)], 0, Warmup(accuracy=0.05))

    async def main() -> None:
        names = ["bootstrap", "trainer", "validator", "inference-1", "inference-2"]
        folder = tmp_path / "swarm"
        async with swarm(folder, base, fork_server, names=names, steps=STEPS) as peers:
            await peers.start()
            for worker in peers.of_role("inference"):
                await worker.says("inference.receipt", outcome="accepted")
            policy = await peers.complete(STEPS * STEP_SECONDS)
            check_accounts(peers)
            for worker in peers.of_role("inference"):
                assert not worker.heard("inference.receipt", outcome="refused")
            before, after = (dict(load_model(each).named_parameters()) for each in (base, policy))
            moved = [name for name in before if not before[name].equal(after[name])]
            assert {"model.layers.0.linear_attn.A_log", "lm_head.weight"} <= set(moved)

    trio.run(main)
