"""The environment `code`: its tasks, and programs that want a reward they did not earn."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import pytest

from peers.environments import Environment, Task, Transcript, grade, load, split_of, task_of
from peers.environments.code import Code, CodeOptions
from peers.environments.graders.code import program_in
from peers.environments.interface import as_text
from peers.sandbox import Limits, Outcome, Program, run, why_none
from peers.sandbox.run import check
from swarm.errors import UserError

works = pytest.mark.skipif(bool(why_none()), reason=f"no sandbox here: {why_none()}")

CODE = Code(CodeOptions(tests=3))


def drawn(environment: Code, number: int = 0, split="train") -> Task:
    return task_of(environment, number.to_bytes(32, "big"), split)


def rewarded(environment: Environment, task: Task, program: str, finished: bool = True) -> float:
    return grade(environment, task, Transcript.of(program, finished=finished)).reward


def test_equal_seeds_give_equal_tasks_of_their_split():
    for split in ("train", "held_out"):
        for number in range(20):
            task = drawn(CODE, number, split)
            assert task == drawn(CODE, number, split)
            assert split_of(task.prompt) == split
            assert all(output is not None for output in task.data["tests"]["outputs"])


@works
def test_an_equal_program_is_run_once():
    programs: list[Program] = []

    def counted(program: Program, limits: Limits) -> Outcome:
        programs.append(program)
        return run(program, limits)

    environment = Code(CodeOptions(), run_program=counted)
    task = drawn(environment)
    for _ in range(3):
        assert rewarded(environment, task, task.answer) == 1
        assert rewarded(environment, task, "no program:") == 0
    assert rewarded(environment, drawn(environment, 1), task.answer) == 0
    assert len(programs) == 2


def test_the_hidden_tests_are_not_in_the_prompt():
    for number in range(20):
        task = drawn(CODE, number)
        inputs = task.data["tests"]["inputs"]
        assert not any(str(numbers) in as_text(task.prompt) for (numbers,) in inputs if numbers)


@works
def test_the_reference_solves_every_problem():
    environment = CODE
    for number in range(2):
        task = drawn(environment, number)
        assert rewarded(environment, task, task.answer) == 1.0
    assert rewarded(environment, task, f"So:\n```python\n{task.answer}```\nDone.") == 1.0


@works
def test_passing_some_tests_is_worth_nothing():
    task = drawn(CODE, 1)
    tests = task.data["tests"]
    pairs = zip(tests["inputs"], map(json.dumps, tests["outputs"]), strict=True)
    every = {tuple(numbers): output for (numbers,), output in pairs}
    known = dict(list(every.items())[:-1])
    partial = f"import json\ndef solve(xs): return json.loads({known!r}[tuple(xs)])"
    assert rewarded(CODE, task, partial) == 0.0
    assert rewarded(CODE, task, partial.replace(repr(known), repr(every))) == 1.0


def test_an_unfinished_or_empty_program_is_not_run():
    task = drawn(CODE)
    assert rewarded(CODE, task, task.answer, finished=False) == 0.0
    assert rewarded(CODE, task, "  \n") == 0.0


EQUAL_TO_ALL = """class Same(int):
    def __eq__(self, other): return True
def solve(xs): return Same(123456)
"""
PRINTS_A_VERDICT = """print('1.0'); print('passed'); print('["0","0","0"]')
def solve(xs): return True
"""
PATCHES_THE_TESTS = """import json, sys, os
json.dumps = lambda *a, **k: 'true'
sys.modules['__main__'].attempt = lambda *a: 'true'
for name in os.listdir('.'):
    open(name, 'w').write('print("[]")')
def solve(xs): return 123456
"""
FORGES_THE_REPORT = """import os
for n in range(256):
    try: os.write(n, b'["1","1","1"]')
    except OSError: pass
def solve(xs): return 123456
"""
KILLS_THE_HARNESS = "import os; os.kill(os.getppid(), 9)"
READS_THE_EXPECTED = """import gc
found = [d for d in gc.get_objects() if isinstance(d, dict) and 'outputs' in d]
def solve(xs): return found[0]
"""


@works
@pytest.mark.parametrize(
    "program",
    [
        EQUAL_TO_ALL,
        PRINTS_A_VERDICT,
        PATCHES_THE_TESTS,
        FORGES_THE_REPORT,
        KILLS_THE_HARNESS,
        READS_THE_EXPECTED,
        "import os; os._exit(0)",
        "def solve(xs): raise SystemExit(0)",
        "\ud800",
    ],
)
def test_a_program_that_cheats_earns_nothing(program):
    assert rewarded(CODE, drawn(CODE), program) == 0.0


@works
def test_an_endless_program_ends():
    environment = Code(CodeOptions(tests=2, cpu_seconds=0.2))
    assert rewarded(environment, drawn(environment), "while True: pass") == 0.0


def test_without_a_sandbox_no_reward_is_given():
    def refuse(*_: object) -> NoReturn:
        check("not permitted")
        raise AssertionError("unreachable")

    environment = Code(CodeOptions(), run_program=refuse)
    with pytest.raises(UserError, match=r"^no sandbox works .*allow user namespaces"):
        rewarded(environment, drawn(environment), "def solve(xs): return 1")


@pytest.mark.parametrize("steps", [1, 2])
def test_no_constant_passes_all_tests(steps):
    environment = Code(CodeOptions(steps=steps, tests=2))
    for number in range(20):
        first, second = drawn(environment, number).data["tests"]["outputs"]
        assert first != second


def test_a_wrong_option_is_refused():
    with pytest.raises(UserError, match="'code': options: steps is 3"):
        load("code", "2", {"steps": 3})


def test_problems_are_of_few_kinds_and_equal_ones_have_equal_tests():
    tests: dict[str, Any] = {}
    for number in range(200):
        task = drawn(CODE, number)
        prompt = as_text(task.prompt)
        assert re.fullmatch(r"(over|times|add|first) -?\d+; (sum|list|(max|min) -?\d+)>", prompt)
        assert tests.setdefault(prompt, task.data) == task.data
    assert len(tests) < 200


def test_the_last_block_of_python_counts_before_one_without_a_tag():
    assert program_in("```python\na\n```\ntext\n```\nb\n```") == "a\n"
    assert program_in("```\na\n```\ntext\n```\nb\n```") == "b\n"
    assert program_in("no block") == "no block"


SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3", "7\n"]}


@works
def test_problems_of_a_file(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "Add up.", "tests": SUM}) + "\n", encoding="utf-8")
    options: dict[str, Any] = {
        "path": str(path),
        "columns": {"prompt": "question", "answer": "", "tests": "tests"},
        "grader": "code",
        "grader_options": {"cpu_seconds": 2},
    }
    environment = load("dataset", "1", options)
    task = task_of(environment, bytes(32), "train")
    adds = "print(sum(map(int, input().split())))"
    for program, reward in (
        (adds, 1.0),
        (f"{adds}\nprint()", 1.0),
        (f"{adds}\nprint('passed')", 0.0),
        ("print(3)", 0.0),
    ):
        assert rewarded(environment, task, program) == reward
