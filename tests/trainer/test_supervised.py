from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from typer.testing import CliRunner

from peers.demo import CALCULATOR
from peers.engines.demo import EOS_ID
from peers.engines.model import load as load_model
from peers.engines.model import read_weights
from peers.environments import Renderer
from peers.trainer.examples import epochs, stop_id
from peers.trainer.supervised import SftService
from swarm.app.main import app
from swarm.errors import UserError
from swarm.jobs.offline import StartTuning, Tune, Tuned, TuningSettings, TuningStarted, Validate
from swarm.jobs.training import Export


def write_examples(path: Path, count: int = 40) -> Path:
    rows = [{"prompt": f"{n:02}>", "answer": f"{n % 7}"} for n in range(count)]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    return path


def begin(base: Path, data: Path, **settings: Any) -> tuple[SftService, TuningStarted]:
    service = SftService()
    chosen = TuningSettings(**{"batch": 8, "learning_rate": 3e-3, "steps": 40, **settings})
    job = StartTuning(model=str(base), settings=chosen, data=str(data))
    return service, trio.run(service.start, job)


def step(service: SftService) -> Tuned:
    return trio.run(service.step, Tune())


def test_it_learns_the_answers_and_writes_a_policy(base: Path, tmp_path: Path) -> None:
    service, told = begin(base, write_examples(tmp_path / "data"), validation_share=0.1)
    assert (told.examples, told.held_back, told.left_out) == (36, 4, 0)
    losses = [step(service).loss for _ in range(40)]
    assert losses[0] > 3 > 1.5 > sum(losses[-4:]) / 4
    trio.run(service.save, Export(folder=str(tmp_path / "out")))
    before, after = read_weights(base), read_weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert {value.dtype for value in after.values()} == {torch.float32}
    load_model(tmp_path / "out")
    Renderer(tmp_path / "out")


def test_the_loss_is_on_the_answer_alone_packed_or_not(base: Path, tmp_path: Path) -> None:
    """As literal as can be: each example by itself through the model."""
    service, _ = begin(base, write_examples(tmp_path / "data", 12), validation_share=0.0, batch=12)
    model, renderer = load_model(base).eval(), Renderer(base)
    surprise, count = 0.0, 0
    for n in range(12):
        prompt = renderer.encode_prompt(f"{n:02}>")
        answer = [*renderer.encode_completion(f"{n % 7}"), EOS_ID]
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        log_all = torch.log_softmax(logits.detach(), -1)
        surprise -= float(log_all[range(len(answer)), answer].sum())
        count += len(answer)
    first = step(service)
    assert first.tokens == count
    assert first.loss == pytest.approx(surprise / count, abs=1e-5)


def test_episodes_are_learned_turn_by_turn(base: Path) -> None:
    service = SftService()
    settings = TuningSettings(batch=4, learning_rate=3e-3, steps=2, validation_share=0.0)
    job = StartTuning(model=str(base), settings=settings, environment=CALCULATOR)
    trio.run(service.start, job)
    assert {len(example.model_segments) for example in service._examples} == {2}
    assert step(service).tokens == sum(
        len(example.model_tokens) for example in islice(epochs(service._examples, 0), 4)
    )


def test_examples_held_back_are_never_trained_on(base: Path, tmp_path: Path) -> None:
    service, _ = begin(base, write_examples(tmp_path / "data"), validation_share=0.3)
    trained = {tuple(example.prompt) for example in service._examples}
    assert not trained & {tuple(example.prompt) for example in service._held_back}
    measured = trio.run(service.validate, Validate())
    assert measured.loss is not None and measured.loss > 3
    assert measured.exact is not None and 0 <= measured.exact < 0.01


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", 'line 2 is not an object with "prompt" and "answer"'),
        ('{"prompt": "a"}', "line 2: answer is None; it must be text"),
    ],
)
def test_a_broken_line_is_named(base: Path, tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "data").write_text('{"prompt": "1>", "answer": "1"}\n' + line)
    with pytest.raises(UserError, match=sentence):
        begin(base, tmp_path / "data")


def test_what_cannot_work_is_refused(base: Path, tmp_path: Path) -> None:
    data = write_examples(tmp_path / "data", 3)
    with pytest.raises(UserError, match="--batch is 0; it must be at least 1"):
        begin(base, data, batch=0)
    with pytest.raises(UserError, match=r"leaves no example to train on \(0 of at most 2"):
        begin(base, data, tokens_max=2)
    with pytest.raises(UserError, match="cannot be read"):
        begin(base, tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="eos_token_id is None"):
        stop_id(tmp_path)


@pytest.mark.slow
def test_the_command_tells_what_it_does(base: Path, tmp_path: Path) -> None:
    arguments = ["sft", "--model", str(base), "--out", str(tmp_path / "out"), "--json"]
    arguments += ["--data", str(write_examples(tmp_path / "data")), "--steps", "4"]
    result = CliRunner().invoke(app, [*arguments, "--report-every", "2", "--batch", "8"])
    assert result.exit_code == 0, result.output
    told = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["event"], line.get("step")) for line in told] == [
        ("started", None),
        ("validated", 0),
        ("trained", 2),
        ("validated", 2),
        ("trained", 4),
        ("validated", 4),
        ("saved", None),
    ]
    assert told[0]["examples"] == 38 and told[2]["tokens_per_second"] > 0
    load_model(tmp_path / "out")
