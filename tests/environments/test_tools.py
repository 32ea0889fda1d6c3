"""The environment `tools`: calls, their results, and what earns the reward."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.environments import Episode, Grade, Transcript, grade, load, task_of
from peers.environments.tools import Tools, ToolsOptions, calculate, called, run_python
from peers.sandbox import Outcome, why_none

EASIEST: dict[str, Any] = {"statement": "bare", "digits": 2, "operations": 1, "must_call": True}


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<calc>1+2</calc>", ("calc", "1+2")),
        ("I think so: <calc>1</calc> <calc> 1+2 </calc>\n", ("calc", " 1+2 ")),
        ("<python>print(1 < 2)\n</python>", ("python", "print(1 < 2)\n")),
        ('<tool_call>\n{"name": "calc", "arguments": {"x": "1+2"}}\n</tool_call>', ("calc", "1+2")),
        ("<calc>1+2</calc> = 3", None),
        ("<calc>1+2", None),
        ("<calc>1+2</python>", None),
        ("<shell>ls</shell>", None),
        ('<tool_call>{"name": "calc"}</tool_call>', None),
        ('<tool_call>{"name": "calc", "arguments": {"x": 3}}</tool_call>', None),
        ("<tool_call>no</tool_call>", None),
        ("", None),
    ],
)
def test_a_call_is_the_last_element_of_a_turn(text: str, call: Any) -> None:
    assert called(text, ["calc", "python"]) == call
    assert call is None or called(text, ["other"]) is None


def test_openings_without_end_take_no_quadratic_time() -> None:
    """Each of them had the rest of the text searched, while no other thread could run."""
    names = itertools.islice(itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=3), 13_000)
    began = time.process_time()
    assert called("".join(f"<{''.join(name)}>" for name in names), ["calc"]) is None
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        (" -(2+3) * 2 ", "-10"),
        ("7/2", "3.5"),
        ("1/3", "0.333333333333"),
        ("0.1+0.2", "0.3"),
        ("7//2", "3"),
        ("-7%3", "2"),
        ("1/0", "error: division by zero"),
        ("2**3", "error: not an expression"),
        ("9" * 200, "9" * 200),
        ("9" * 201, "error: not an expression"),
        ("(" * 150, "error: not an expression"),
        ("*".join(["9" * 60] * 3), str((10**60 - 1) ** 3)),
        ("__import__('os')", "error: not an expression"),
        ("", "error: not an expression"),
    ],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


@given(st.text(alphabet="0123456789+-*/%(). e_", max_size=60))
def test_no_expression_makes_it_raise(expression: str) -> None:
    assert isinstance(calculate(expression), str)


@given(st.binary(max_size=16), st.integers(1, 9), st.integers(1, 16))
def test_a_call_and_its_result_solve_every_task(seed: bytes, digits: int, operations: int) -> None:
    environment = Tools(ToolsOptions(digits=digits, operations=operations, must_call=True))
    task = task_of(environment, seed)
    call, answer = task.model_turns
    result = Episode(environment, task).step(call)
    assert result == f"<result>{answer}</result>"
    for end, reward in ((answer, 1.0), (f"It is {answer}.", 1.0), (f"{answer}1", 0.0)):
        parts = {"answer": reward, "tool": 1.0}
        assert grade(environment, task, Transcript.of(call, result, end)) == Grade(reward, parts)


def test_the_right_number_without_a_tool_earns_nothing_if_it_must_be_called() -> None:
    environment = load("tools", "1", EASIEST)
    task = task_of(environment, b"seed")
    assert isinstance(task.prompt, str) and len(task.prompt) <= 6
    for turns, reward in (
        ([task.answer], 0.0),
        (["<calc>x</calc>", "<result>error: not an expression</result>", task.answer], 0.0),
        (["<calc>1</calc>", "<result>1</result>", task.answer], 1.0),
    ):
        assert grade(environment, task, Transcript.of(*turns)).reward == reward
    lenient = load("tools", "1", EASIEST | {"must_call": False})
    assert grade(lenient, task, Transcript.of(task.answer)).reward == 1.0


def test_calls_beyond_the_limit_end_the_episode() -> None:
    environment = Tools(ToolsOptions(calls=2))
    episode = Episode(environment, task_of(environment, b"seed"))
    answers = [episode.step("<calc>1+1</calc>") for _ in range(3)]
    assert answers == ["<result>2</result>"] * 2 + [None]
    assert Episode(environment, task_of(environment, b"seed")).step("2") is None


def outcome(status: Any, code: int = 0, stdout: bytes = b"", stderr: bytes = b"") -> Outcome:
    return Outcome(status, code, stdout, stderr, 0.0)


@pytest.mark.parametrize(
    ("ended", "shown"),
    [
        (outcome("exited", stdout=b"408\n"), "408"),
        (outcome("exited", 1, b"1\n", b"Traceback\nNameError: x\n"), "1\nerror: NameError: x"),
        (outcome("timeout"), "error: timeout"),
        (outcome("exited", stdout=b"x" * 9_000), "x" * 2_000),
    ],
)
def test_what_a_program_shows(ended: Outcome, shown: str) -> None:
    assert run_python("pass", lambda *_: ended) == shown
    assert run_python(" ", lambda *_: ended) == "error: the program is empty"


@pytest.mark.skipif(bool(why_none()), reason=f"no sandbox here: {why_none()}")
def test_the_interpreter_runs_in_the_sandbox_and_needs_a_served_run() -> None:
    environment = Tools(ToolsOptions(tools=["python"]))
    assert not environment.replayable and Tools().replayable
    task = task_of(environment, b"seed")
    call, answer = task.model_turns
    assert Episode(environment, task).step(call) == f"<result>{answer}</result>"
