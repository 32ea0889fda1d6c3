"""The environment `dataset`: rows as tasks, their grader, and what can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.environments import Transcript, grade, load, task_of
from peers.environments.interface import Message, UnusableTask, messages_of
from peers.environments.probe import probe_seed
from swarm.errors import UserError
from tests.commands.harness import complaint, swarm
from tests.commands.test_commands import RUN
from tests.commands.test_impossible_runs import describe
from tests.environments.test_rows import write

SUMS: list[dict[str, Any]] = [
    {"question": f"{n}+{n}>", "result": 2 * n, "unit": "m", "tests": {"inputs": [n]}}
    for n in range(200)
]


def dataset(path: Path, **options: Any) -> Any:
    return load("dataset", "1", {"path": str(path), **options})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_tasks_that_a_grader_grades(suffix: str, tmp_path: Path) -> None:
    environment = dataset(
        write(tmp_path / f"sums{suffix}", SUMS),
        columns={"prompt": "question", "answer": "result", "cases": "tests", "unit": "unit"},
        grader="number",
        grader_options={"tolerance": 0.5},
    )
    train = [task_of(environment, probe_seed(index)) for index in range(200)]
    held_out = [task_of(environment, probe_seed(index), "held_out") for index in range(20)]
    assert not {task.prompt for task in train} & {task.prompt for task in held_out}
    assert len({task.prompt for task in train}) > 100
    task = train[0]
    number = int(task.answer) // 2
    assert task.prompt == f"{number}+{number}>"
    assert task.data == {"cases": {"inputs": [number]}, "unit": "m"}
    for text, finished, reward in (
        (f"It is {task.answer}.4", True, 1),
        (f"It is {task.answer}.6", True, 0),
        (f"It is {task.answer}", False, 0),
    ):
        assert grade(environment, task, Transcript.of(text, finished=finished)).reward == reward


def test_prompts_are_made_of_columns_or_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    path = write(tmp_path / "one.jsonl", [{"q": "1+1", "u": 3, "chat": messages, "answer": "2"}])
    asked = dataset(path, columns={"prompt": "{q} in {u}?", "answer": ""})
    assert asked.task_of_row(0).prompt == "1+1 in 3?" and asked.task_of_row(0).answer == ""
    chat = dataset(path, columns={"prompt": "chat"})
    assert chat.task_of_row(0).prompt == (Message("system", "Add."), Message("user", "1+1"))
    told = task_of(dataset(path, columns={"prompt": "chat"}, system_prompt="Sum."), b"x").prompt
    assert messages_of(told) == (Message("system", "Sum."), Message("user", "1+1"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, r"columns names the column 'prompt', which .* lacks; it has: question, result"),
        ({"columns": {"prompt": "question"}}, r"columns names the column 'answer'"),
        ({"columns": {"prompt": "{q}?"}}, r"columns names the column 'q'"),
        ({"columns": {"prompt": "qestion"}}, r"did you mean 'question'\?"),
        ({"columns": {"prompt": 7}}, r"columns: prompt is 7; it must name a column"),
        ({"hash": "ab" * 32}, r"has the hash [0-9a-f]{64}, but the option hash is abab"),
        ({"grader": "vibes"}, r"grader 'vibes' is unknown; there are: "),
        ({"grader_options": ["x=y"]}, r"grader_options has 'x=y', whose value is no JSON"),
        ({"colums": 1}, r"unknown key 'colums'"),
        ({"where": {"unit": "km"}}, r"leaves none of the 200 rows .* unit = 'm';"),
        ({"where": {"tests.inputs.3": 1}}, r"where leaves none .* no tests.inputs.3;"),
        ({"where": {"units": "m"}}, r"where names the column 'units'.*did you mean 'unit'"),
    ],
)
def test_wrong_options_are_sentences(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "sums.jsonl", SUMS)
    known = {"columns": {"prompt": "question", "answer": "result"}}
    given = options if not options else {**known, **options}
    with pytest.raises(UserError, match=sentence):
        _ = dataset(path, **given).cached_tasks


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": 7, "answer": "x"}, r"row 1: the prompt in 'prompt' is 7; it must be text, or"),
        ({"prompt": [{"role": "user"}], "answer": "x"}, r"row 1: the prompt in 'prompt' is \[{"),
        ({"prompt": "x", "answer": None}, r"row 1: 'answer' is None; it must be text or a number"),
        ({"prompt": "x", "answer": float("nan")}, r"row 1: 'answer' is nan; it must be text or"),
        ({"prompt": "x"}, r"row 1 cannot be read \(it lacks 'answer'; it has: prompt\)"),
    ],
)
def test_a_row_of_the_wrong_form_is_named(
    row: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    environment = dataset(write(tmp_path / "d.jsonl", [{"prompt": "a", "answer": "b"}, row]))
    with pytest.raises(UnusableTask, match=sentence):
        environment.cached_tasks.at(1)


def test_a_run_has_the_hash_of_its_data(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", SUMS)
    text = RUN.replace('"sort-digits"', '"dataset"').replace(
        "[sampling]",
        f'options = {{path = "{path}", where = {{unit = "m"}}, '
        'columns = {prompt = "question", answer = "result"}}\n'
        "[sampling]",
    )
    arguments = describe(tmp_path, text)
    outcome = swarm(*arguments)
    assert outcome.status == 0 and outcome.errors.count("warning: ") == 1, outcome.errors
    assert "has no weights to measure with" in outcome.errors
    digest = dataset(path, columns={"prompt": "question", "answer": "result"}).rows.hash()
    assert digest.encode() in (tmp_path / "run.manifest").read_bytes()
    (tmp_path / "run.toml").write_text(text.replace("path =", f'hash = "{"0" * 64}", path ='))
    assert f"has the hash {digest}, but the option hash is 000" in complaint(*arguments)
