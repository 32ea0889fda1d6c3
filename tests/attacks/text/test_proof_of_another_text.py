"""The proof of one text beside the tokens of another, a single token changed, or an invented proof.

Caught by `proofs` where any token but the last changed or the proof is invented, by
`sampling_bound` or the evidence where only the last one is; always before the text is trained on.

Cost: the swarm recomputes one submission; the cheat's work.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from peers.calibration.work import HandedIn
from peers.proofs.format import PRIME
from swarm.jobs import SubmissionOrder
from swarm.wire.manifest import Sampling
from tests.attacks.cheats import Generates, Work
from tests.attacks.models import Arena


def test_one_text_proven_another_handed_in(arena: Arena) -> None:
    def mixed(work: Work, sampling: Sampling, _: SubmissionOrder) -> HandedIn:
        proved = Generates(arena.engine).submit(work, sampling)
        other = [
            row[:-1]
            for row in Generates(arena.engine, attempt=1).submit(work, sampling).completions
        ]
        texts = [
            [*(token for token in text if token not in sampling.stop_ids), *[4] * 8][: len(row) - 1]
            + row[-1:]
            for text, row in zip(other, proved.completions, strict=True)
        ]
        return HandedIn(texts, proved.proofs)

    met = arena.evicts(mixed, 300)
    assert met.failed["proofs"] == 1


@pytest.mark.parametrize("inside", [True, False])
def test_one_changed_token(arena: Arena, inside: bool) -> None:
    order = arena.order(0, max_new_tokens=6)  # so that most rollouts end at the limit
    _, rollouts = arena.honest_file(order)
    row = next(row for row in range(32) if 2 not in rollouts.rollout(row).model_tokens)
    end = rollouts.token_offsets[row + 1]
    place = end - 4 if inside else end - 1
    found = {}
    for token in range(4, 14):
        tokens = rollouts.tokens.copy()
        if tokens[place] == token:
            continue
        tokens[place] = token
        _, judged = arena.judge(order, replace(rollouts, tokens=tokens))
        assert judged is not None
        assert judged.evidence.mismatches >= 1
        found[token] = judged.failed
    if inside:  # every later activation depends on it
        assert all(found.values()) and "proofs" in found.values()
    else:
        refused = [check for check in found.values() if check]
        assert len(refused) > 0.6 * len(found), "the rest is nearly tied with the seed's token"


def test_invented_proofs(arena: Arena) -> None:
    chance = np.random.default_rng(1)

    def invented(work: Work, sampling: Sampling, _: SubmissionOrder) -> HandedIn:
        made = Generates(arena.engine).submit(work, sampling)
        coefficients = chance.integers(0, PRIME, 128, dtype=np.uint16).astype(">u2").tobytes()
        proof = PRIME.to_bytes(2, "big") + coefficients
        return HandedIn(made.completions, [[proof for _ in row] for row in made.proofs])

    met = arena.evicts(invented, 300)
    assert met.failed["proofs"] == 1
