"""Generation, proofs and judgement together: an honest worker passes, cheaters do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peers.engines import demo
from peers.engines.engine import Prefill
from peers.engines.native import NativeEngine
from peers.engines.sampling import Judgement, gumbel_noise, judge_margins
from peers.environments import Renderer, load, task_of
from peers.proofs import toploc
from peers.proofs.format import check_format
from tests.engines.harness import Made, complete, prefill_completions

KEY = (11, 12)
ROWS = range(24)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("policies")
    for name, seed in (("right", 0), ("wrong", 1)):
        demo.make_policy(root / name, seed)
    return root / "right", root / "wrong"


def prompts_of(folder: Path) -> list[list[int]]:
    environment, renderer = load("sort-digits", "1"), Renderer(folder)
    tasks = [task_of(environment, bytes([group])) for group in range(6)]
    return [renderer.encode_prompt(task.prompt) for task in tasks for _ in range(4)]


def work(folder: Path, key: tuple[int, int] = KEY) -> tuple[Made, list[list[bytes]]]:
    made = complete(NativeEngine(folder), prompts_of(folder), ROWS, key, 1.0, [demo.EOS_ID], 40)
    proofs = [
        toploc.build(toploc.chunk_rows(before, rows))
        for before, rows in zip(made.prompt_hidden, made.hidden, strict=True)
    ]
    return made, proofs


def judge(folder: Path, tokens: list[list[int]]) -> tuple[Prefill, Judgement]:
    engine = NativeEngine(folder)
    recomputed = prefill_completions(engine, prompts_of(folder), tokens)
    noise = torch.cat(
        [
            gumbel_noise(KEY, torch.full((len(row),), index), torch.arange(len(row)), 64)
            for index, row in zip(ROWS, tokens, strict=True)
        ]
    )
    flat = torch.tensor([token for row in tokens for token in row])
    logits = engine.logits(torch.cat(recomputed.states))
    return recomputed, judge_margins(logits, flat, 1.0, noise)


def verify(recomputed: Prefill, proofs: list[list[bytes]]) -> list[toploc.ChunkResult]:
    chunks = [
        chunk
        for before, rows in zip(recomputed.prompt_hidden, recomputed.hidden, strict=True)
        for chunk in toploc.chunk_rows(before, rows)
    ]
    return toploc.verify(chunks, [proof for row in proofs for proof in row])


def test_an_honest_worker_passes(folders: tuple[Path, Path]) -> None:
    made, proofs = work(folders[0])
    for tokens, row in zip(made.tokens, proofs, strict=True):
        check_format(row, [len(tokens)])
    recomputed, judged = judge(folders[0], made.tokens)
    assert float(judged.margin.max()) < 1e-4
    assert torch.allclose(judged.log_probability, torch.cat(made.log_probabilities), atol=1e-4)
    assert all(result.accepted for result in verify(recomputed, proofs))


def test_other_weights_fail_the_proofs(folders: tuple[Path, Path]) -> None:
    made, proofs = work(folders[1])
    recomputed, _ = judge(folders[0], made.tokens)
    assert not any(result.accepted for result in verify(recomputed, proofs))


def test_other_noise_passes_the_proofs_and_fails_the_margins(folders: tuple[Path, Path]) -> None:
    made, proofs = work(folders[0], key=(11, 13))
    recomputed, judged = judge(folders[0], made.tokens)
    assert all(result.accepted for result in verify(recomputed, proofs))
    assert float(judged.margin.clamp(max=1).mean()) > 0.5
