"""The last layer is not computed: a linear map, fitted to the policy's states, predicts them.

Caught by `proofs` in the first submission that is recomputed; evicted (*policy*) with it.

Cost: the swarm recomputes one submission; the cheat computes half of the layers for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peers.calibration.work import HandedIn, prove
from peers.engines.batch import generate, requests_for
from peers.engines.engine import Engine
from swarm.wire.manifest import Sampling
from tests.attacks.cheats import Work
from tests.attacks.models import FP32, Arena, without_last_layer


@dataclass
class Spoofs:
    """Generates with one layer less and a linear map, and proves the map's outputs."""

    whole: Engine
    cut: Engine
    map: Tensor

    @classmethod
    def fitted(cls, arena: Arena, cut: Engine) -> Spoofs:
        work = [arena.work(arena.order(number)) for number in range(100, 110)]
        prompts = [prompt for each in work for prompt in each.prompts]
        sampled = [range(1, len(prompt)) for prompt in prompts]
        inputs = torch.cat(cut.prefill(prompts, sampled).states)
        outputs = torch.cat(arena.engine.prefill(prompts, sampled).states)
        return cls(arena.engine, cut, torch.linalg.lstsq(inputs, outputs).solution)

    def submit(self, work: Work, sampling: Sampling) -> HandedIn:
        engine = self.cut
        logits = engine.logits
        engine.logits = lambda states: logits(states @ self.map)  # type: ignore[method-assign]
        requests = requests_for(
            work.prompts, range(len(work.prompts)), work.key(), sampling.temperature,
            sampling.stop_ids, sampling.max_new_tokens,
        )  # fmt: skip
        made = generate(engine, requests)
        engine.logits = logits  # type: ignore[method-assign]
        spoofed = [(each.hidden.float() @ self.map).bfloat16() for each in made]
        before = [(each.prompt_hidden.float() @ self.map).bfloat16() for each in made]
        return HandedIn([each.tokens for each in made], prove(before, spoofed))


def test_predicted_hidden_states_are_caught(arena: Arena) -> None:
    cut = FP32.engine(without_last_layer(arena))
    met = arena.evicts(Spoofs.fitted(arena, cut), 300)
    assert met.accepted == 0 and met.failed["proofs"] == 1
