"""Genesys records as tasks: verifiers by task type, and wrong records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peers.environments import Transcript, grade, load, task_of
from peers.environments.genesys import verifiers_of
from peers.environments.interface import UnusableTask
from peers.environments.probe import probe_seed
from peers.environments.row_check import first_rows
from swarm.errors import UserError
from tests.environments.test_rows import write


def record(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "problem_id": f"sum-{number}",
        "source": "sums",
        "task_type": "verifiable_sum",
        "in_source_id": None,
        "prompt": f"What is {number} + {number}?",
        "gold_standard_solution": f"It is {2 * number}",
        "verification_info": json.dumps({"ground_truth": str(2 * number)}),
        "metadata": "{}",
        **fields,
    }


CODE = record(
    0,
    task_type="verifiable_code",
    prompt="Print the sum of two numbers.",
    verification_info={
        "language": "python",
        "test_cases": [
            {"fn_name": None, "input": "1 2\n", "output": "3\n", "type": "stdin_stdout"},
            {"fn_name": None, "input": "4 5\n", "output": "9\n", "type": "stdin_stdout"},
        ],
    },
)


POEM = record(0, task_type="poem")


def genesys(path: Path, **options: Any) -> Any:
    return load("genesys", "1", {"path": str(path), **options})


def test_a_record_is_a_task_that_its_verifier_grades(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", [record(n) for n in range(100)])
    environment = genesys(path, verifiers={"verifiable_sum": {"grader": "number", "tolerance": 0}})
    task = task_of(environment, probe_seed(0))
    number = int(task.data["problem_id"].removeprefix("sum-"))
    assert task.prompt == f"What is {number} + {number}?"
    assert task.answer == f"It is {2 * number}" and task.data["source"] == "sums"
    assert grade(environment, task, Transcript.of(task.answer)).reward == 1
    assert grade(environment, task, Transcript.of("It is -1")).reward == 0
    assert grade(environment, task, Transcript.of(task.answer, finished=False)).reward == 0
    assert environment.pins() == {"hash": environment.rows.hash()}


@pytest.mark.slow
def test_records_of_code_are_run_against_their_tests(tmp_path: Path) -> None:
    environment = genesys(
        write(tmp_path / "code.jsonl", [CODE, record(1)]), where={"task_type": "verifiable_code"}
    )
    task = task_of(environment, probe_seed(0))
    right = "```python\nprint(sum(map(int, input().split())))\n```"
    assert grade(environment, task, Transcript.of(right)).reward == 1
    assert grade(environment, task, Transcript.of("print(3)")).reward == 0


def test_records_without_a_verifier_are_a_sentence_or_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "mixed.jsonl", [POEM, *(record(n) for n in range(30))])
    verifiers = {"verifiable_sum": "number"}
    with pytest.raises(UserError, match=r"row 0: no verifier .* task_type 'poem'; add"):
        genesys(path, verifiers=verifiers).cached_tasks.at(0)
    chosen = genesys(path, verifiers=verifiers, where={"task_type": "verifiable_sum"})
    assert list(chosen.indices) == list(range(1, 31))
    assert chosen.cached_tasks.at(0).data["task_type"] == "verifiable_sum"
    with pytest.raises(UserError, match=r"where leaves none of .* task_type = "):
        _ = genesys(path, where={"task_type": "poems"}).cached_tasks


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"verification_info": "{"}, r"row 0: verification_info is no JSON: Expecting"),
        ({"verification_info": [1]}, r"row 0: verification_info is \[1\]; it must be a table"),
        ({"prompt": None}, r"row 0: the prompt in 'prompt' is None; it must be text"),
    ],
)
def test_wrong_records_are_sentences(fields: Any, sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [record(0, **fields)])
    with pytest.raises(UserError, match=sentence):
        genesys(path, verifiers={"verifiable_sum": "number"}).cached_tasks.at(0)


@pytest.mark.parametrize(
    ("verifier", "sentence"),
    [
        (3, r"verifiers: sum is 3; it must be a grader, or a table such as"),
        ({"tolerance": 1}, r"sum is \{'tolerance': 1\}; it must be a grader"),
        ({"grader": "number", "x": 1}, r"unknown key 'x'"),
        ("vibes", r"grader 'vibes' is unknown"),
    ],
)
def test_wrong_verifiers_are_sentences(verifier: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        verifiers_of({"sum": verifier}, "verifiers")


def test_a_file_without_the_records_columns_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a record of genesys names the column 'problem_id', whi"):
        genesys(write(tmp_path / "d.jsonl", [{"prompt": "x"}]))


@pytest.mark.parametrize(
    ("kind", "gold", "text", "right"),
    [
        ("code_output_prediction", "[1, 2]", 'So ```json\n{"output": [1, 2]}\n``` it is.', True),
        ("code_output_prediction", "[1, 2]", '{"output": "[1, 2]"}', True),
        ("code_output_prediction", [1, 2], '{"output": [1, 2]}', True),
        ("code_output_prediction", '{"output": "a"}', 'No {"output": "b"}, {"output": "a"}', True),
        ("code_output_prediction", "a", '{"output": "a", "why": {"output": "b"}}', True),
        ("code_output_prediction", "a", '{"output": "a"} or {"output": "b"}', False),
        ("code_output_prediction", "a", "a", False),
        ("code_output_prediction", "a", '{"result": "a"}', False),
        ("code_output_prediction", "a", '{"output": ' * 9999, False),
        ("complex_json_output", {"a": [1]}, 'It is {"a": [1.0]}', True),
        ("complex_json_output", {"a": [1]}, '{"a": [1], "b": 2}', False),
        ("verifiable_math", [r"\frac12", "50 cents"], r"\boxed{0.5}", True),
        ("verifiable_math", ["7", "the number seven"], r"\boxed{\text{the number seven}}", True),
        ("verifiable_math", ["7", "8"], r"\boxed{9}", False),
        ("verifiable_math", 7, r"\boxed{7}", True),
    ],
)
def test_answers_as_json_and_several_answers(
    kind: str, gold: Any, text: str, right: bool, tmp_path: Path
) -> None:
    row = record(0, task_type=kind, verification_info=json.dumps({"ground_truth": gold}))
    environment = genesys(write(tmp_path / "d.jsonl", [row]))
    task = environment.cached_tasks.at(0)
    assert grade(environment, task, Transcript.of(text)).reward == right
    without = write(tmp_path / "e.jsonl", [{**row, "gold_standard_solution": None}])
    task = genesys(without).cached_tasks.at(0)
    assert grade(environment, task, Transcript.of(task.answer)).reward == 1, "the answer is known"


@pytest.mark.parametrize(
    ("kind", "info", "sentence"),
    [
        ("verifiable_math", {"ground_truth": "proof"}, "'proof' is a proof or none"),
        ("verifiable_math", {"ground_truth": r"\text{See proof.}"}, "is a proof or none"),
        ("verifiable_math", {"ground_truth": "Let x. " * 99}, "is a proof or none"),
        (
            "verifiable_math",
            {"ground_truth": []},
            r"'ground_truth' is \[\]; it must be text or a num",
        ),
        ("verifiable_code", {**CODE["verification_info"], "language": "cpp"}, "in 'cpp'"),
        ("prime_rl_code", {"test_cases": "[]"}, "there are 0"),
    ],
)
def test_a_record_that_nobody_can_grade_costs_itself(
    kind: str, info: Any, sentence: str, tmp_path: Path
) -> None:
    good = record(1, task_type="verifiable_math")
    rows = [record(0, task_type=kind, verification_info=info), *[good] * 30]
    environment = genesys(write(tmp_path / "d.jsonl", rows))
    with pytest.raises(UnusableTask, match=f"row 0: .*{sentence}"):
        environment.cached_tasks.at(0)
    read = first_rows(environment, None)
    assert read is not None and (read.faults, read.rows) == (1, 31)
