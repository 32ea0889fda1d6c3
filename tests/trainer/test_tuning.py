from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import trio
from typer.testing import CliRunner

from peers.demo.recipes import RECIPES
from peers.engines.demo import EOS_ID
from peers.engines.loading import load as load_model
from peers.engines.model import read_weights
from peers.environments import Renderer
from peers.learning.data_files import cache_folder
from peers.learning.examples import Encoder, read_examples, stop_id
from peers.tuning.command import HARDLY, warn_if_stuck
from peers.tuning.service import Example, Tuning, batch_of, read_job
from swarm.commands.main import app
from swarm.errors import UserError
from swarm.jobs.offline import (
    Reading,
    SaveState,
    StartTuning,
    Tune,
    Tuned,
    TuningSettings,
    TuningStarted,
    Validate,
)
from swarm.jobs.training import Export
from swarm.rollouts.rollout import Rollout


def write_examples(path: Path, count: int = 40) -> Path:
    path = path.with_suffix(".jsonl")
    rows = [{"prompt": f"{n:02}>", "answer": f"{n % 7}"} for n in range(count)]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    return path


def begin(
    base: Path, data: Path, reading: Reading | None = None, **settings: Any
) -> tuple[Tuning, TuningStarted]:
    service = Tuning()
    chosen = TuningSettings(**{"batch": 8, "learning_rate": 3e-3, "steps": 40, **settings})
    job = StartTuning(
        model=str(base), settings=chosen, data=[str(data)], reading=reading or Reading()
    )
    return service, trio.run(service.start, job)


def rollouts(examples: Iterable[Example]) -> list[Rollout]:
    return [rollout for example in examples for rollout in example.rollouts]


def step(service: Tuning) -> Tuned:
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


@pytest.mark.parametrize(("loss", "rate"), [("answers", 0.1), ("preferences", 0.005)])
def test_the_default_rate_goes_by_the_width_and_learns(
    base: Path, tmp_path: Path, loss: str, rate: float
) -> None:
    data = tmp_path / "data.jsonl"
    (write_pairs if loss == "preferences" else write_examples)(data)
    service, told = begin(base, data, loss=loss, learning_rate=None, validation_share=0.0)
    width = json.loads((base / "config.json").read_text())["hidden_size"]
    assert told.learning_rate == pytest.approx(rate / width)
    losses = [step(service).loss for _ in range(40)]
    assert sum(losses[-4:]) < (1 - HARDLY) * sum(losses[:4])


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (3.52, 3.41, "give a larger --learning-rate than 1e-05, or more --steps"),
        (3.52, 3.6, "give a smaller --learning-rate than 1e-05"),
        (3.52, 0.88, ""),
        (0.04, 0.04, ""),
    ],
)
def test_a_loss_that_does_not_fall_is_warned_of(
    before: float, now: float, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_if_stuck(150, before, now, 1e-5)
    said = capsys.readouterr().err
    figures = f"after step 150 the loss on held-out examples is {now}, and was {before} at the"
    assert words in said and (figures in said) == bool(words)


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
    service = Tuning()
    settings = TuningSettings(batch=4, learning_rate=3e-3, steps=2, validation_share=0.0)
    job = StartTuning(
        model=str(base), settings=settings, environment=RECIPES["calculator"].environments[0]
    )
    trio.run(service.start, job)
    assert {len(rollout.model_segments) for rollout in rollouts(service._examples)} == {2}
    drawn = [service._examples[index] for _, index in service._mixture.batch(0, 4)]
    assert step(service).tokens == sum(len(each.model_tokens) for each in rollouts(drawn))


def test_examples_held_back_are_never_trained_on(base: Path, tmp_path: Path) -> None:
    service, _ = begin(base, write_examples(tmp_path / "data"), validation_share=0.3)
    trained = {tuple(rollout.prompt) for rollout in rollouts(service._examples)}
    assert not trained & {tuple(rollout.prompt) for rollout in rollouts(service._held_back)}
    measured = trio.run(service.validate, Validate())
    assert measured.loss is not None and measured.loss > 3
    assert measured.answer_probability is not None and 0 <= measured.answer_probability < 0.01


def test_each_step_has_its_share_of_each_source(base: Path, tmp_path: Path) -> None:
    """Also where one source is a tenth of the other; a resumed tuning goes on at its position."""
    for name, answer, count in (("a", "1", 10), ("b", "22", 100)):
        rows = [json.dumps({"prompt": f"{n}>", "answer": answer}) for n in range(count)]
        (tmp_path / name).with_suffix(".jsonl").write_text("\n".join(rows))
    service = Tuning()
    job = StartTuning(
        model=str(base),
        settings=TuningSettings(batch=8, learning_rate=1e-3, steps=9, validation_share=0.1),
        data=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")],
        weights=[3, 1],
    )
    told = trio.run(service.start, job)
    assert (told.examples, told.held_back) == (99, 11)
    assert [step(service).tokens for _ in range(3)] == [6 * 2 + 2 * 3] * 3
    trio.run(service.save_state, SaveState(folder=str(tmp_path / "state")))
    expected = step(service)
    job = msgspec.structs.replace(job, state=str(tmp_path / "state"))
    again = Tuning()
    trio.run(again.start, job)
    assert step(again) == expected
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("5>", "6>"))
    with pytest.raises(UserError, match="an interrupted tuning of another model, data or settings"):
        trio.run(Tuning().start, job)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("{", r"data.jsonl cannot be read"),
        ('{"prompt": "1>", "answer": "1"}\n[]', r"row 1 cannot be read \(it is no JSON object\)"),
        (
            '{"prompt": "a"}',
            "--answer-column names the column 'answer', which .* lacks; it has: prompt",
        ),
        ('{"prompt": "a", "answer": [1]}', r"row 0: 'answer' is \[1\]; it must be text or a num"),
        ('{"prompt": [], "answer": "1"}', r"row 0: the prompt in 'prompt' is \[\]; it must"),
        ('{"messages": [{"role": "user"}]}', "or messages with role and content"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
            r"row 0: the prompt in 'messages' is .* parts of the type text",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}', "a chat has the roles user; it needs"),
        ('{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}', "has no chat template"),
    ],
)
def test_a_broken_row_is_named(base: Path, tmp_path: Path, rows: str, sentence: str) -> None:
    (tmp_path / "data.jsonl").write_text(rows)
    with pytest.raises(UserError, match=sentence):
        begin(base, tmp_path / "data.jsonl")


def test_what_cannot_work_is_refused(base: Path, tmp_path: Path) -> None:
    data = write_examples(tmp_path / "data", 3)
    with pytest.raises(UserError, match="--batch is 0; it must be at least 1"):
        begin(base, data, batch=0)
    with pytest.raises(UserError, match=r"leaves no example to train on \(0 of at most 2"):
        begin(base, data, tokens_max=2)
    for reading, sentence in (
        (Reading(where={"answr": "1"}), "--where names the column 'answr'.*did you mean 'answer'"),
        (Reading(where={"answer": "9:"}), "--where leaves none of the 3 rows"),
        (Reading(subset="other"), "is one file; remove split and subset"),
        (Reading(prompt_column="{q}>"), "--prompt-column or --answer-column names the column 'q'"),
    ):
        with pytest.raises(UserError, match=sentence):
            begin(base, data, reading)
    with pytest.raises(UserError, match="nothing does not exist; give a file"):
        begin(base, tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="eos_token_id is None"):
        stop_id(tmp_path)


def test_parquet_folders_and_other_columns_are_read(base: Path, tmp_path: Path) -> None:
    """Rows as the Hugging Face hub has them give the same examples as JSON lines."""
    rows = [json.loads(line) for line in write_examples(tmp_path / "d").read_text().split("\n\n")]
    table = {"q": [row["prompt"] for row in rows], "a": [row["answer"] for row in rows]}
    (tmp_path / "hub/data").mkdir(parents=True)
    pq.write_table(pa.table(table), tmp_path / "hub/data/train-00000.parquet")
    pq.write_table(pa.table({"q": ["x"], "a": ["y"]}), tmp_path / "hub/data/test-00000.parquet")
    lines, _ = begin(base, tmp_path / "d.jsonl")
    service, _ = begin(base, tmp_path / "hub", Reading(prompt_column="q", answer_column="a"))
    assert rollouts(service._examples) == rollouts(lines._examples)
    (tmp_path / "nested.jsonl").write_text("\n".join(json.dumps({"row": row}) for row in rows))
    reading = Reading(prompt_column="row.prompt", answer_column="row.answer")
    service, _ = begin(base, tmp_path / "nested.jsonl", reading)
    assert rollouts(service._examples) == rollouts(lines._examples)


def test_only_rows_that_meet_the_conditions_are_read(base: Path, tmp_path: Path) -> None:
    """Of the data set in the folder that is named; prompts may be texts with columns in braces."""
    for name, shift in (("main", 0), ("other", 5)):
        rows = [
            {"a": n, "b": n + shift, "c": "1", "about": {"level": n % 3}, "chosen": "1"}
            | {"rejected": "2"}
            for n in range(9)
        ]
        (tmp_path / "set" / name).mkdir(parents=True)
        (tmp_path / "set" / name / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    decode = Renderer(base).decode_completion
    reading = Reading(
        subset="other",
        where={"about": {"level": "1:"}, "a": "!4"},
        prompt_column="{a}+{b}>",
        answer_column="c",
    )
    nested = {"length(about.deep.a)": "1:"}
    with (tmp_path / "set/main/train.jsonl").open("a") as file:
        deep = '{"a": ' + "[" * 900 + "]" * 900 + "}"
        file.write("\n" + json.dumps(rows[0] | {"about": {"level": 1, "deep": deep}}))
    main = msgspec.structs.replace(reading, subset="main", where=nested)
    with pytest.raises(UserError, match="leaves none of the 10 rows"):
        read_examples(tmp_path / "set", base, 99, main)
    for pairs in (False, True):
        found, *_ = read_examples(tmp_path / "set", base, 99, reading, pairs=pairs)
        texts = [[decode(each.prompt, ())[0] for each in example] for example in found]
        assert texts == [[f"<bos>{n}+{n + 5}>"] * (1 + pairs) for n in (1, 2, 5, 7, 8)]


def test_examples_are_encoded_once(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other data, other columns, another tokenizer or pairs are encoded by themselves."""
    count = 0
    encode = Encoder.encode

    def counted(encoder: Encoder, record: Any) -> Rollout | None:
        nonlocal count
        count += 1
        return encode(encoder, record)

    monkeypatch.setattr(Encoder, "encode", counted)
    data = write_rollouts(tmp_path / "r.jsonl", base, [[0, 1, 0.5], [1, 0, 1]])
    reading = Reading(reward=(0.5, math.inf))
    first = read_examples(data, base, 2, reading)
    assert count == 4 and first[1:] == (4, 2)
    first = read_examples(data, base, 99, reading)
    assert count == 8 and len(first[0]) == 4 and first[1:] == (0, 2)
    assert read_examples(data, base, 99, reading) == first and count == 8
    pairs = read_examples(data, base, 99, Reading(), pairs=True)
    assert count == 12 and read_examples(data, base, 99, Reading(), pairs=True) == pairs
    assert [len(each) for each in pairs[0]] == [2, 2] and count == 12
    for cached in cache_folder().glob("*.examples"):
        cached.write_bytes(cached.read_bytes()[:-9])
    assert read_examples(data, base, 99, reading) == first and count == 16
    other = shutil.copytree(base, tmp_path / "other")
    (other / "chat_template.jinja").write_text(CHATML)
    read_examples(data, other, 99, reading)
    assert count == 20
    data.write_text(data.read_text().replace("accepted", "refused"))
    assert read_examples(data, base, 99, reading) == ([], 0, 6)


CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{{ '!' if m['role'] == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_only_the_assistants_words_of_a_chat_are_learned(base: Path, tmp_path: Path) -> None:
    model = tmp_path / "chatty"
    shutil.copytree(base, model)
    (model / "chat_template.jinja").write_text(CHATML)
    messages = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
    chat = [{"role": role, "content": content} for role, content in messages]
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"messages": chat}))
    ((found,),), *_ = read_examples(data, model, 99, Reading())
    decode = Renderer(model).decode_completion
    assert [(each.kind, decode(each.tokens, [EOS_ID])[0]) for each in found.segments] == [
        ("prompt", "<user>1<assistant>"),
        ("model", "2"),
        ("environment", "!<user>3<assistant>"),
        ("model", "4"),
    ]
    parts = [{"type": "text", "text": part} for part in ("1", "")]
    data.write_text(json.dumps({"messages": [{**chat[0], "content": parts}, *chat[1:]]}))
    (in_parts,), *_ = read_examples(data, model, 99, Reading())
    assert in_parts == [found]
    data.write_text(json.dumps({"prompt": "1", "answer": "2"}))
    ((asked,),), *_ = read_examples(data, model, 99, Reading(chat=True))
    assert asked.segments[:2] == found.segments[:2]


def write_rollouts(path: Path, base: Path, rewards: Sequence[Sequence[float]]) -> Path:
    """Groups of rollouts, as `swarm rollouts export` writes them."""
    renderer = Renderer(base)
    rows = []
    for group, group_rewards in enumerate(rewards):
        for sample, reward in enumerate(group_rewards):
            texts = {"prompt": f"{group}>", "model": f"{sample}"}
            turns = [
                {
                    "kind": kind,
                    "text": text,
                    "tokens": renderer.encode_completion(text),
                    "finish": "stop" if kind == "model" else None,
                }
                for kind, text in texts.items()
            ]
            row = {"submission": "ab", "group": group, "reward": reward, "verdict": "accepted"}
            rows.append(json.dumps({**row, "turns": turns}))
    path.write_text("\n".join(rows))
    return path


def test_rollouts_are_chosen_by_reward(base: Path, tmp_path: Path) -> None:
    data = write_rollouts(tmp_path / "r.jsonl", base, [[0, 1, 0.5], [0, 0, 0], [1, 0, 1]])
    found, *_ = read_examples(data, base, 99, Reading(reward=(1.0, math.inf)))
    decode = Renderer(base).decode_completion
    assert [decode(each.tokens, ())[0] for (each,) in found] == ["0>1", "2>0", "2>2"]
    job = StartTuning(
        model=str(base), data=[str(data)], settings=TuningSettings(loss="preferences")
    )
    (pairs,) = read_job(job, 99)[0]
    texts = [[decode(rollout.tokens, ())[0] for rollout in pair.rollouts] for pair in pairs]
    assert texts == [["0>1", "0>0"], ["2>0", "2>1"]]


def test_a_teachers_solutions_are_chosen_by_reward(base: Path, tmp_path: Path) -> None:
    """A task's best solution is preferred to its worst, as of rollouts; the form of SYNTHETIC-1."""
    told = [(0, "0", 0.0), (0, "1", 1.0), (0, "2", 1.0), (1, "3", 1.0), (2, "4", 0.0)]
    rows = [
        {"prompt": f"{task}>", "llm_response": answer, "score": reward}
        | {"task_type": "sort", "problem_id": f"p{task}"}
        for task, answer, reward in told
    ]
    data = tmp_path / "solutions.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    decode = Renderer(base).decode_completion
    found, *_ = read_examples(data, base, 99, Reading(reward=(1.0, math.inf)))
    assert [decode(each.model_tokens, ())[0][0] for (each,) in found] == ["1", "2", "3"]
    job = StartTuning(
        model=str(base), data=[str(data)], settings=TuningSettings(loss="preferences")
    )
    ((pair,),) = read_job(job, 99)[0]
    assert read_job(msgspec.structs.replace(job, reading=Reading(reward=(2.0, 3.0))), 99) == (
        [[]],
        0,
        5,
    )
    assert [decode(each.model_tokens, ())[0][0] for each in pair.rollouts] == ["1", "0"]


def test_rollouts_of_another_tokenizer_are_refused(base: Path, tmp_path: Path) -> None:
    data = write_rollouts(tmp_path / "r.jsonl", base, [[1.0]])
    text = data.read_text()
    for old, new, sentence in [
        ('"text": "0>"', '"text": "1>"', "row 0 was sampled with another tokenizer"),
        ('"text": "0>"', '"text": null', "export the rollouts with --tokenizer"),
        ('"kind": "model"', '"kind": "prompt"', "is no rollout as `swarm rollouts export`"),
        ('"submission": "ab", ', "", "is no rollout as `swarm rollouts export`"),
    ]:
        data.write_text(text.replace(old, new))
        with pytest.raises(UserError, match=sentence):
            read_examples(data, base, 99, Reading())


def write_pairs(path: Path, count: int = 24) -> Path:
    rows = [
        {"prompt": f"{n:02}>", "chosen": f"{n % 7}", "rejected": f"{(n + 1) % 7}7"}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_preferences_are_learned(base: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "pairs.jsonl")
    service, told = begin(base, data, loss="preferences", validation_share=0.25, steps=12)
    assert (told.examples, told.held_back) == (18, 6)
    before = trio.run(service.validate, Validate())
    assert before.loss == pytest.approx(math.log(2))
    assert before.margin == pytest.approx(0, abs=1e-4)
    losses = [step(service).loss for _ in range(12)]
    assert losses[0] == pytest.approx(math.log(2)) and losses[-1] < 0.5
    after = trio.run(service.validate, Validate())
    assert after.preferred == 1.0 and after.margin is not None and after.margin > 1


def test_the_gradient_of_a_preference_is_that_of_its_formula(base: Path, tmp_path: Path) -> None:
    """As literal as can be: −log σ(β·margin) + the chosen answers' loss, through the model."""
    data = write_pairs(tmp_path / "pairs.jsonl", 3)
    service, _ = begin(
        base, data, loss="preferences", validation_share=0.0, batch=3, beta=0.7, answer_weight=0.3
    )
    with torch.no_grad():  # away from the reference
        for parameter in service._policy.model.parameters():
            parameter.mul_(1.05)
    batch = batch_of(service._examples)
    scores = service._score(service._examples).requires_grad_()
    weights, value = service._loss.weigh(service._examples, batch, lambda _: scores.detach())
    sums = torch.stack([part.sum() for part in scores.split(batch.completion_lengths.tolist())])
    reference = torch.tensor([example.reference for example in service._examples])
    margin = sums[0::2] - sums[1::2] - reference
    chosen = batch.completion_lengths[0::2].sum()
    loss = -torch.log(torch.sigmoid(0.7 * margin)).mean() - 0.3 * sums[0::2].sum() / chosen
    loss.backward()
    assert value == pytest.approx(float(loss.detach()), rel=1e-5)
    assert scores.grad is not None
    torch.testing.assert_close(-scores.grad, weights)


@pytest.mark.parametrize("loss", ["answers", "preferences"])
def test_a_resumed_tuning_equals_an_uninterrupted_one(
    base: Path, tmp_path: Path, loss: str
) -> None:
    data = tmp_path / "data.jsonl"
    (write_pairs if loss == "preferences" else write_examples)(data)
    whole, _ = begin(base, data, loss=loss, steps=6)
    expected = [step(whole) for _ in range(6)]
    first, _ = begin(base, data, loss=loss, steps=6)
    for _ in range(3):
        step(first)
    trio.run(first.save_state, SaveState(folder=str(tmp_path / "state")))
    second = Tuning()
    job = msgspec.structs.replace(first._job, state=str(tmp_path / "state"))
    assert trio.run(second.start, job).steps_done == 3
    assert [step(second) for _ in range(3)] == expected[3:]
    with pytest.raises(UserError, match="an interrupted tuning of another model, data or settings"):
        trio.run(Tuning().start, msgspec.structs.replace(job, model=str(base / ".") + "/"))
    (tmp_path / "state/state.json").write_text("{}")
    with pytest.raises(UserError, match="holds no state that can be read"):
        trio.run(Tuning().start, job)


def test_what_is_no_preference_is_refused(base: Path, tmp_path: Path) -> None:
    data = write_examples(tmp_path / "data")
    with pytest.raises(UserError, match="--data names the column 'chosen', which"):
        begin(base, data, loss="preferences")
    with pytest.raises(UserError, match=r"--beta is 0\.0; it must be above 0"):
        begin(base, data, loss="preferences", beta=0.0)
    equal = write_rollouts(tmp_path / "r.jsonl", base, [[0, 0], [1, 1]])
    with pytest.raises(UserError, match="a pair needs answers of unequal reward to a prompt"):
        begin(base, equal, loss="preferences")


@pytest.mark.slow
def test_the_command_tells_what_it_does(base: Path, tmp_path: Path) -> None:
    arguments = ["sft", "--model", str(base), "--out", str(tmp_path / "out"), "--json"]
    arguments += ["--data", str(write_examples(tmp_path / "data")), "--steps", "4"]
    arguments += ["--learning-rate", "1e-9"]  # nothing is learned
    result = CliRunner().invoke(app, [*arguments, "--report-steps", "2", "--batch", "8"])
    assert result.exit_code == 0, result.output
    assert "warning: after step 2 the loss on held-out examples is" in result.stderr
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
