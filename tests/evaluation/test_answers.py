"""What lm-eval asks of an engine: likelihoods as transformers computes them, and stop texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from peers.engines.demo import make_policy
from peers.engines.engine import Piece, Request
from peers.engines.native import NativeEngine
from peers.environments import Renderer
from peers.evaluation import answers
from peers.evaluation.answers import Continuation, generate, score


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_policy(folder, seed=3)
    return folder


def texts(folder: Path, *wanted: Continuation) -> dict[int, str]:
    found: dict[int, str] = {}
    generate(NativeEngine(folder), Renderer(folder), wanted, [2], found.__setitem__)
    return found


def test_likelihoods_are_those_of_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = NativeEngine(folder)
    context, continuation = [1, 9, 8, 7], [14, 5, 6]
    monkeypatch.setattr(answers, "LOGITS_BYTES_MAX", 2 * 4 * 64)  # two rows at a time
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *continuation]])).logits[0, 3:-1]
    expected = torch.log_softmax(logits, -1)[range(3), continuation].sum()
    found = score(engine, context, continuation)
    assert found.log_probability == pytest.approx(float(expected), abs=1e-4)
    likeliest = logits.argmax(-1).tolist()
    assert found.is_greedy == (likeliest == continuation)
    assert score(engine, context, likeliest[:1]).is_greedy
    long = score(engine, [1] * 100, continuation)  # the model has 64 positions
    assert long == score(engine, [1] * 61, continuation)


def test_a_text_in_chunks_is_the_text_in_one_piece(folder: Path) -> None:
    prompt = Renderer(folder).encode_prompt("472918>")
    engine = NativeEngine(folder)
    engine.submit(Request(0, prompt, 0, None, 1.0, (2,), 50))
    pieces: list[Piece] = []
    while not pieces:
        pieces = engine.step()
    whole, _ = Renderer(folder).decode_completion(pieces[0].tokens, [2])
    found = texts(folder, Continuation(prompt, [], 50), Continuation(prompt, [whole[3:5]], 50))
    assert found == {0: whole, 1: whole[: whole.find(whole[3:5])]}
    assert len(pieces[0].tokens) > answers.CHUNK


def test_prompt_and_limit_are_cut_to_the_context(folder: Path) -> None:
    each = Continuation([1] * 100, [], 50)
    each.fit(64)
    assert (len(each.prompt), each.limit) == (32, 32)
    each = Continuation([1] * 10, [], 256)
    each.fit(64)
    assert (len(each.prompt), each.limit) == (10, 54)
    assert len(texts(folder, Continuation([1] * 100, [], 5, temperature=1.0, row=7))) == 1
