"""The grader `code`: right programs in every form that models write and data sets test."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.environments import NotGradable, Transcript, grade, load
from peers.environments.graders import make_grader
from peers.environments.graders.code import (
    BATCH_GROWTH,
    CANDIDATES_MAX,
    FIRST_BATCH,
    Code,
    blocks,
    candidates,
)
from peers.environments.graders.code_tests import RESULT_BYTES, prints, read_tests, returns
from peers.environments.graders.syntax_service import SyntaxService
from peers.sandbox import Limits, Outcome, Program, run, why_none
from tests.environments.test_genesys import record
from tests.environments.test_rows import write

works = pytest.mark.skipif(bool(why_none()), reason=f"no sandbox here: {why_none()}")
GRADER = make_grader("code")
PAGE = (Path(__file__).parents[2] / "docs/environments.md").read_text(encoding="utf-8")
PROGRAM = "n = int(input())\nprint(2 * n)\n"
DOUBLES = {"inputs": ["3\n", "10\n"], "outputs": ["6\n", "20\n"]}
ADDS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}


def chosen(text: str, function: str = "") -> str | None:
    """The program that the grader takes from a completion."""
    sources = candidates(text)
    index = SyntaxService()({"sources": sources, "function": function})
    return sources[index] if index >= 0 else None


def reward(text: str, tests: Any, **data: Any) -> float:
    return GRADER.grade(text, "", {"tests": tests, **data}).reward


TAGS = (
    "python", "py", "python3", "Python", "PYTHON", "py3", "Python3.11", "pypy", "pypy3", "{python}",
    "{.python .numberLines}", 'python title="a.py"', "python linenos=true", "python,linenos", "",
    " python ", "language-python", "lang=python", "python:main.py", "main.py", "code",
)  # fmt: skip
OTHERS = ("text", "bash", "json", "cpp", "txt", "console", "python-repl", "pycon", "pytb")


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("fence", ["```", "````", "~~~"])
def test_a_tag_or_fence_in_another_spelling(tag: str, fence: str) -> None:
    block = f"{fence}{tag}\n{PROGRAM}{fence}\n"
    assert chosen(f"So:\n{block}Done.") == PROGRAM
    assert chosen(block.replace("\n", "\r\n")) == PROGRAM


@pytest.mark.parametrize("tag", OTHERS)
@pytest.mark.parametrize(
    "content", ["3", '{"a": [1, -2]}', "pip install x", "(1, 2)\n3 4", ">>> 3"]
)
def test_a_block_in_another_language_stands_before_or_after(tag: str, content: str) -> None:
    other = f"```{tag}\n{content}\n```\n"
    for program in (f"```python\n{PROGRAM}```\n", f"```\n{PROGRAM}```\n"):
        for text in (other + program, program + other, other + program + other):
            assert chosen(text) == PROGRAM
    untagged = other.replace(tag, "", 1)
    assert chosen(f"```python\n{PROGRAM}```\nOutput:\n{untagged}") == PROGRAM
    assert chosen(f"```\n{PROGRAM}```\nOutput:\n{untagged}") == PROGRAM


def indented(text: str, indent: str) -> str:
    return "".join(f"{indent}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "text",
    [
        PROGRAM,
        indented(PROGRAM, "    "),
        indented(f"```python\n{PROGRAM}```", "   "),
        "1. ```python\n" + indented(f"{PROGRAM}```", "   "),
        "- Here:\n  ```py\n" + indented(f"{PROGRAM}", "    ") + "  ```",
        indented(f"```python\n{PROGRAM}```", "> "),
        f"Here it is: ```python\n{PROGRAM}```",
        f"```python\n{PROGRAM.rstrip()}```",
        f"```\npython\n{PROGRAM}```",
        f"````markdown\nSo:\n```python\n{PROGRAM}```\n````",
        f"```text\n3\n\n```python\n{PROGRAM}```",
        f"\ufeff{PROGRAM}",
        f"```python\nbroken(\n```\n```python\n{PROGRAM}```\n```python\nfor\n```",
        f"```text\n3\n```\nNow:\n```python\n{PROGRAM}```\n```python\n# cut off",
    ],
)  # fmt: skip
def test_indentation_lists_and_sloppy_fences(text: str) -> None:
    found = chosen(text)
    assert found is not None and found.strip() == PROGRAM.strip()


def test_a_program_is_the_one_that_defines_the_function():
    solution = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
    text = f"```python\n{solution}```\nUse it:\n```python\nprint(Solution().add(1, 2))\n```\n"
    assert chosen(text, "add") == solution
    assert chosen("```python\nadd = lambda a, b: a + b\n```\n```\nadd(1, 2)\n```", "add") == (
        "add = lambda a, b: a + b\n"
    )
    assert (
        chosen("So `print(3)`: ```python print(2 * int(input()))```") == "print(2 * int(input()))"
    )


def test_an_unclosed_block_or_an_example_is_no_program():
    assert chosen(f"```python\n{PROGRAM}") is None
    assert chosen("```text\n3\n```") is None and chosen("no program") is None
    assert chosen("```json\n[1, 2]\n```\n42") is None


def test_docstrings_with_fences_are_part_of_a_program():
    program = f'def f():\n    """Doubles.\n\n    ```\n    f()\n    ```\n    """\n{PROGRAM}'
    assert chosen(program) == program
    assert chosen(f"````python\n{program}````") == program


@settings(max_examples=50)
@given(st.text(alphabet="`~ \n>-pyx{}1.:", max_size=200))
def test_any_text_has_blocks(text: str) -> None:
    assert all(block.text.count("\n") <= text.count("\n") + 1 for block in blocks(text))
    assert len(candidates(text)) <= CANDIDATES_MAX + 1


def test_a_line_of_a_million_marks_is_read():
    for filling in ("`", "~", "```a", "``` ` ", "~~~`", "> ", "```\n"):
        candidates(filling * (1_000_000 // len(filling)))


@pytest.mark.parametrize(
    "tests",
    [
        DOUBLES,
        json.dumps(DOUBLES),
        json.dumps(json.dumps(DOUBLES)),
        {"tests": DOUBLES},
        {"test_cases": json.dumps(DOUBLES)},
        {"inputs": [["3"], [10]], "outputs": [["6"], [20]]},
        {"inputs": [3, "10"], "outputs": [6, "20  \n\n"]},
        [{"input": "3", "output": "6"}, {"input": ["10"], "output": 20, "fn_name": None}],
        json.dumps([{"stdin": "3", "expected_output": "6"}, {"stdin": "10", "stdout": "20"}]),
        {"inputs": ["3"], "outputs": ["6"], "fn_name": None},
    ],
)
@works
def test_standard_input_in_every_form(tests: Any) -> None:
    assert reward(PROGRAM, tests) == 1
    assert reward("print(6)\nprint(input())", tests) == 0


FUNCTION = "def add(a: int, b: int) -> Optional[int]:\n    return a + b"


@works
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ([[1, 2], [3, 4]], [3, 7]),
        ([[1, 2], [3, 4]], [[3], [7]]),
        ([[1, 2], [3, 4]], ["3", "7"]),
        (["1\n2\n", "3\n4"], ["3", "7"]),
        (["[1, 2]", "[3, 4]"], [3, 7]),
        ([{"a": 1, "b": 2}, {"b": 4, "a": 3}], [3.0, 7.0]),
    ],
)
def test_calls_in_every_form(inputs: Any, outputs: Any) -> None:
    tests = {"inputs": inputs, "outputs": outputs, "fn_name": "add"}
    assert reward(FUNCTION, tests) == 1
    assert reward(FUNCTION.replace("a + b", "a - b"), tests) == 0


@works
@pytest.mark.parametrize(
    "program",
    [
        FUNCTION,
        "class Solution:\n    def add(self, a: List[int], b: 'X') -> int:\n        return a + b",
        "class Solution:\n    @staticmethod\n    def add(a, b):\n        return operator.add(a, b)",
        "class Adder:\n    def add(self, a, b):\n        return a + b",
        FUNCTION + "\nif __name__ == '__main__':\n    print(add(input(), 1))",
    ],
)
def test_a_function_or_a_method_of_a_class(program: str) -> None:
    for name in ("add", "Solution.add"):
        assert reward(f"```python\n{program}\n```", {**ADDS, "fn_name": name}) == 1
    assert reward(program, {**ADDS, "fn_name": "other"}) == 0


@works
def test_one_list_as_text_is_one_argument_of_a_function_with_one():
    total = "class Solution:\n    def total(self, xs: List[int]) -> int:\n        return sum(xs)"
    assert reward(total, {"inputs": ["[1, 2]"], "outputs": ["3"], "fn_name": "total"}) == 1


@works
@pytest.mark.parametrize(
    "program",
    [
        "n = int(input()); print(sum(Counter([n, n]).elements()))",
        "import sys\nprint(2 * int(sys.stdin.buffer.read()), flush=True)",
        "import threading\ndef main(): print(2 * int(input()))\n"
        "threading.Thread(target=main).start()",
        "import atexit, io, sys\nn = int(input())\nsys.stdout = io.StringIO()\nprint(2 * n)\n"
        "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\n"
        "print(A(2 * int(input())).x)\nexit()",
        "@lru_cache(None)\ndef f(n): return 2 * n\nprint(f(int(input())), file=sys.stdout)",
    ],
)  # fmt: skip
def test_programs_that_end_as_an_interpreter_lets_them(program: str) -> None:
    assert reward(program, DOUBLES) == 1


@works
@pytest.mark.parametrize("size", [RESULT_BYTES + 1, 10 * RESULT_BYTES])
def test_a_long_output_is_compared_to_its_end(size: int) -> None:
    tests = {"inputs": ["1", "2"], "outputs": ["7\n" * size + "1", "7 " * size + "2"]}
    assert reward(f"n = input()\nprint('7 ' * {size} + n)", tests) == 1
    assert reward(f"n = input()\nprint('7 ' * {size} + '1')", tests) == 0
    assert reward("print('8 ' * 10 ** 7)", tests) == 0
    calls = {"inputs": [[3]], "outputs": ["x" * size], "fn_name": "f"}
    assert reward(f"def f(n): return 'x' * {size}", calls) == 1
    assert reward(f"def f(n): return 'x' * {size - 1} + 'y'", calls) == 0


PACKED = base64.b64encode(
    zlib.compress(pickle.dumps(json.dumps([{"input": "1\n2", "output": "3"}])))
).decode()
ADD, TWICE = "def add(a, b): return a + b", PROGRAM
PUBLISHED: list[tuple[str, dict[str, Any], str]] = [
    ("INTELLECT-2", {"test_cases": json.dumps(DOUBLES)}, TWICE),
    ("INTELLECT-2", {"test_cases": json.dumps(ADDS)}, ADD),
    ("INTELLECT-2", {"test_cases": json.dumps({**ADDS, "fn_name": None}), "fn_name": "add"}, ADD),
    (
        "SYNTHETIC-1",
        {"test_cases": [{"type": "stdin_stdout", "fn_name": None, "input": "3", "output": "6"}]},
        TWICE,
    ),
    (
        "SYNTHETIC-1",
        {
            "test_cases": [
                {"type": "function_call", "fn_name": "f", "input": "[[1]]", "output": "1"}
            ]
        },
        "def f(xs): return sum(xs)",
    ),
    ("APPS, TACO", {"input_output": json.dumps({**ADDS, "outputs": [[3], [7]]})}, ADD),
    ("Eurus-2, PRIME", {"ground_truth": json.dumps({**DOUBLES, "fn_name": None})}, TWICE),
    (
        "Eurus-2, PRIME",
        {"ground_truth": json.dumps({"inputs": ["[1, 2]"], "outputs": ["3"], "fn_name": "f"})},
        "@lru_cache\ndef g(n): return n\ndef f(xs, memo={}): return g(sum(xs))",
    ),
    (
        "CodeContests",
        {
            "public_tests": {"input": ["3"], "output": ["6"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["10"], "output": ["20"]},
        },
        TWICE,
    ),
    ("Open-R1 codeforces", {"official_tests": [{"input": "3", "output": "6"}]}, TWICE),
    (
        "LiveCodeBench",
        {
            "public_test_cases": json.dumps(
                [{"input": "1\n2", "output": "3", "testtype": "functional"}]
            ),
            "private_test_cases": PACKED,
            "metadata": json.dumps({"func_name": "add"}),
        },
        "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b",
    ),
    (
        "DeepCoder",
        {"tests": json.dumps([{"input": "1\n2", "output": "3", "metadata": {"func_name": "add"}}])},
        ADD,
    ),
    ("MBPP", {"test_list": ["assert add(1, 2) == 3", "assert 7 == add(3, b=4)"]}, ADD),
    (
        "AceCode",
        {"test_cases": ["assert f(({1}, 2)) == (2, {1, 0})"]},
        "def f(t): return 2, {0, 1}",
    ),
    (
        "HumanEval",
        {
            "test": "def check(candidate):\n    assert True\n    assert candidate(1, 2) in (3, 9)",
            "entry_point": "add",
        },
        ADD,
    ),
]
"""Data sets, the columns or keys that hold a task's tests, and a right program."""


@works
@pytest.mark.parametrize(("name", "data", "program"), PUBLISHED)
def test_published_tests_are_read_as_they_are(name: str, data: Any, program: str) -> None:
    assert GRADER.grade(program, "", data).reward == 1
    wrong = program.replace("return ", "return 1 + ").replace("2 * n", "3 * n")
    assert GRADER.grade(wrong, "", data).reward == 0
    named = [cell for line in PAGE.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert any(name in cell for cell in named), "docs/environments.md lists the form"


def test_a_pickle_is_not_executed() -> None:
    bomb = b"cos\nsystem\n(S'exit 3'\ntR."
    packed = base64.b64encode(zlib.compress(bomb)).decode()
    with pytest.raises(NotGradable, match="unreadable"):
        read_tests({"private_test_cases": packed})


@works
@pytest.mark.parametrize("name", ["count", "reduce", "permutations", "product", "gcd"])
def test_a_method_may_have_a_name_of_the_prelude(name: str) -> None:
    program = f"class Solution:\n    def {name}(self, a, b):\n        return a + b"
    assert reward(program, {**ADDS, "fn_name": name}) == 1


@works
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def add(a: Optional[TreeNode], b: Literal[1]) -> 'X':\n    return a + b", ADDS),
        ("print(10 ** int(input()))", {"inputs": ["5000"], "outputs": ["1" + "0" * 5000]}),
        (
            "def f(n): return 10 ** n",
            {"inputs": [[5000]], "outputs": ["1" + "0" * 5000], "fn_name": "f"},
        ),
        ("print(2 * int(open('/dev/stdin').read()))", DOUBLES),
        ("print(3e-12)", {"inputs": [""], "outputs": ["0.000000000000"]}),
        ("print('six')", [{"input": "", "output": "6", "accepted_outputs": ["6", "six"]}]),
        (
            "n = int(input()); print(sum(map(int, input().split())))",
            {"inputs": ["200000\n" + "12345 " * 200_000], "outputs": [12345 * 200_000]},
        ),
    ],
)
def test_right_programs_that_other_graders_refuse(program: str, tests: Any) -> None:
    assert reward(program, tests) == 1


@pytest.mark.slow  # thousands of processes
@works
def test_as_many_tests_as_are_allowed_and_few_for_a_wrong_program() -> None:
    count = 2500
    tests = {"inputs": [str(n) for n in range(count)], "outputs": [2 * n for n in range(count)]}
    assert reward(PROGRAM, tests) == 1
    calls = {"inputs": [[n] for n in range(count)], "outputs": tests["outputs"], "fn_name": "f"}
    assert reward("def f(n): return n + n", calls) == 1
    ran: list[int] = []

    def run_counted(program: Program, limits: Limits) -> Outcome:
        ran.append(len(json.loads(program.stdin)["inputs"]))
        return run(program, limits)

    grader = Code(run_program=run_counted)
    assert grader.grade("def f(n): return n + n if n < 20 else 0", "", {"tests": calls}).reward == 0
    assert ran == [FIRST_BATCH, FIRST_BATCH * BATCH_GROWTH]


@pytest.mark.slow  # programs that spend their time
@works
def test_the_time_is_limited_for_each_test_and_for_all():
    spends = "import time\nwhile time.process_time() < {}: pass\nprint(1)"
    tests = {"inputs": [""] * 6, "outputs": [1] * 6}
    grader = make_grader("code", {"cpu_seconds": 0.4, "total_cpu_seconds": 60})
    assert grader.grade(spends.format(0.25), "", {"tests": tests}).reward == 1
    assert grader.grade(spends.format(9), "", {"tests": tests}).parts == {"timeout": 1.0}
    assert grader.grade("import time; time.sleep(99)", "", {"tests": tests}).parts == {
        "timeout": 1.0
    }
    short = make_grader("code", {"cpu_seconds": 0.4, "total_cpu_seconds": 0.5})
    assert short.grade(spends.format(0.25), "", {"tests": tests}).parts == {"timeout": 1.0}


@pytest.mark.parametrize(
    ("printed", "expected", "right"),
    [
        ("3.0", "3", True), ("3", "3.0", True), ("0.3333333333", "0.333333", True),
        ("3.5", "3.50", True), ("1e3", "1000.0", True), ("1e-9", "0.000000", True),
        ("3.1", "3", False), ("0.33", "0.333333", False), ("007", "7", False),
        ("9.1e-31", "1.6e-19", False), ("1000001", "1000000", False), ("nan", "1.0", False),
        ("1e9999", "1.0", False), ("10000000000000001.0", "10000000000000000", False),
        ("Yes", "YES", False), ("1 2", "1", False), ("-0.0", "0", True), ("1_0", "10", False),
    ],
)  # fmt: skip
def test_printed_numbers_may_be_off_by_rounding(printed: str, expected: str, right: bool) -> None:
    assert prints(printed, expected) is right


@pytest.mark.parametrize(
    ("value", "expected", "right"),
    [
        (3, 3.0, True), (3.0, 3, True), (0.1 + 0.2, 0.3, True), (1e-17, 0.0, True),
        ([1, [2.0]], [1, [2]], True), ({"a": 1.0}, {"a": 1}, True), (True, "True", True),
        ([1], "[1]", True), ("a", '"a"', True), (None, "None", True),
        (True, 1, False), (1, True, False), (3.1, 3, False), (9.1e-31, 1.6e-19, False),
        ("3", "4", False), ([1], [1, 1], False), (2, "3", False), (float("nan"), 1.0, False),
        (float("inf"), 1.0, False), (10**20 + 1, 10**20, False), ({"a": 1}, {"b": 1}, False),
        (10**400, 1.5, False), (-(10**400), 0.0, False), ([10**400], "[0.5]", False),
    ],
)  # fmt: skip
def test_returned_values_are_equal_as_json(value: Any, expected: Any, right: bool) -> None:
    assert returns(value, expected) is right


@given(st.lists(st.integers() | st.text(max_size=5) | st.booleans() | st.floats(allow_nan=False)))
def test_a_value_is_itself(values: list[Any]) -> None:
    assert returns(values, json.loads(json.dumps(values)))
    printed = " ".join(map(str, values))
    assert prints(printed, printed)


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ([{"input": "1"}], "a case has no output"),
        ([1], "unreadable"),
        ({"inputs": ["1"], "outputs": []}, "they have 1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "there are 0; 1 to 10000 can be run"),
        (["assert f(1) == 2", "assert f(x) == 2"], "holds more than values"),
        (["assert math.isclose(f(1), 2)"], "is not of the form"),
        (
            [
                {"input": "1", "output": "1", "type": "stdin_stdout"},
                {"input": [1], "output": 1, "fn_name": "f"},
            ],
            "some call a function and others read",
        ),
        ({"inputs": [{"a": 1}], "outputs": ["1"]}, "is no standard input or output"),
        ({"inputs": ["1" * 2**24], "outputs": ["1"]}, "take 167772.. bytes; at most 16777216"),
        ("[" * 9999, "unreadable"),
    ],
)
def test_tests_that_cannot_be_run_are_not_the_programs_fault(tests: Any, says: str) -> None:
    with pytest.raises(NotGradable, match=says):
        read_tests({"tests": tests})


KEYS = (
    *("tests", "test_cases", "inputs", "outputs", "input", "output"),
    *("fn_name", "type", "metadata", "accepted_outputs", "public_tests", "test"),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
    | st.sampled_from(["stdin", "function_call", "assert f(1) == 2", "assert f(", "[1]", "a.b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner)
    | inner.map(lambda value: json.dumps(value)),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_record_has_tests_or_is_not_gradable(data: Any) -> None:
    try:
        tests = read_tests(data)
    except NotGradable:
        return
    assert len(tests.inputs) == len(tests.accepted) >= 1 and all(tests.accepted)
    assert tests.result_bytes <= tests.all_results_bytes and json.dumps(tests.inputs)


def test_a_program_in_another_language_is_not_gradable():
    with pytest.raises(NotGradable, match=r"a program in 'cpp', and the grader 'code' runs Python"):
        GRADER.grade(PROGRAM, "", {"tests": DOUBLES, "language": "cpp"})


@works
@pytest.mark.parametrize(
    "info",
    [
        {"test_cases": json.dumps(DOUBLES)},
        {"tests": json.dumps(DOUBLES), "language": "python3"},
        {"test_cases": [{"type": "stdin_stdout", "input": "3", "output": "6", "fn_name": None}]},
        {"test_cases": json.dumps([{"input": "3", "output": "6"}])},
        {"ground_truth": json.dumps(DOUBLES)},
        {"input_output": json.dumps(DOUBLES)},
        DOUBLES,
    ],
)
def test_records_keep_their_read_tests_several_places(info: Any, tmp_path: Any) -> None:
    row = record(0, task_type="verifiable_code", verification_info=json.dumps(info))
    environment = load("genesys", "1", {"path": str(write(tmp_path / "d.jsonl", [row]))})
    task = environment.task_of_row(0)  # type: ignore[attr-defined]
    text = f"Input:\n```text\n3\n```\n```python3\n{PROGRAM}```\n"
    assert grade(environment, task, Transcript.of(text)).reward == 1
    assert grade(environment, task, Transcript.of("print(6)" + "\n" * 3 + "print(6)")).reward == 0


@works
def test_a_records_function_may_stand_beside_its_tests(tmp_path: Any) -> None:
    info = {"test_cases": json.dumps({"inputs": [[1, 2]], "outputs": [3]}), "fn_name": "add"}
    row = record(0, task_type="verifiable_code", verification_info=info)
    environment = load("genesys", "1", {"path": str(write(tmp_path / "d.jsonl", [row]))})
    task = environment.task_of_row(0)  # type: ignore[attr-defined]
    assert grade(environment, task, Transcript.of("def add(a, b): return a + b")).reward == 1
