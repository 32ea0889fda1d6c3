"""The grader `code`: programs that want a reward they did not earn."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest

from peers.environments import Transcript, grade, load, task_of
from peers.environments.graders.code import Code, CodeLimits, program_in
from peers.sandbox import Limits, Outcome, Program, run, why_none
from peers.sandbox.run import check
from swarm.errors import UserError

works = pytest.mark.skipif(bool(why_none()), reason=f"no sandbox here: {why_none()}")

RIGHT = "solve=lambda xs:max([x*3 for x in xs],default=-4)"
INPUTS: list[list[int]] = [[], [3, -5, 8], [40, 2]]
OUTPUTS = [-4, 24, 120]
TESTS = {"inputs": [[xs] for xs in INPUTS], "outputs": OUTPUTS, "fn_name": "solve"}
OTHERS = {**TESTS, "outputs": [-4, 3, 2]}

CODE = Code()


def rewarded(program: str, tests: Any = TESTS, grader: Code = CODE) -> float:
    return grader.grade(program, "", {"tests": tests}).reward


@works
def test_an_equal_program_is_run_once() -> None:
    programs: list[Program] = []

    def counted(program: Program, limits: Limits) -> Outcome:
        programs.append(program)
        return run(program, limits)

    grader = Code(run_program=counted)
    for _ in range(3):
        assert rewarded(RIGHT, grader=grader) == 1
        assert rewarded("no program:", grader=grader) == 0
    assert rewarded(RIGHT, OTHERS, grader) == 0
    assert len(programs) == 2


@works
def test_a_right_program_in_a_block_earns_the_reward() -> None:
    assert rewarded(f"So:\n```python\n{RIGHT}```\nDone.") == 1.0


@works
def test_passing_some_tests_is_worth_nothing() -> None:
    pairs = zip(INPUTS, OUTPUTS, strict=True)
    every = {tuple(xs): output for xs, output in pairs}
    known = dict(list(every.items())[:-1])
    assert rewarded(f"def solve(xs): return {known!r}[tuple(xs)]") == 0.0
    assert rewarded(f"def solve(xs): return {every!r}[tuple(xs)]") == 1.0


def test_an_empty_program_is_not_run() -> None:
    assert rewarded("  \n") == 0.0


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
def test_a_program_that_cheats_earns_nothing(program: str) -> None:
    assert rewarded(program) == 0.0


@works
def test_an_endless_program_ends() -> None:
    assert rewarded("while True: pass", grader=Code(CodeLimits(cpu_seconds=0.2))) == 0.0


def test_without_a_sandbox_no_reward_is_given() -> None:
    def refuse(*_: object) -> NoReturn:
        check("not permitted")
        raise AssertionError("unreachable")

    with pytest.raises(UserError, match=r"^no sandbox works .*allow user namespaces"):
        rewarded("def solve(xs): return 1", grader=Code(run_program=refuse))


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
        assert grade(environment, task, Transcript.of(program)).reward == reward
        assert grade(environment, task, Transcript.of(program, finished=False)).reward == 0
