"""The environment `harness`: a program in a process of its own that asks the model over HTTP."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from peers.endpoint.harness.environment import Harness
from peers.endpoint.harness.run import Answered
from peers.environments import Environment, Transcript, grade, load, task_of
from peers.environments.interface import Message, NotGradable, messages_of
from peers.environments.play import Episode
from peers.environments.renderer import variables_of
from swarm.errors import UserError

PROGRAM = """
import http.client, json, os, sys, time
from urllib.parse import urlsplit

URL = urlsplit(os.environ["OPENAI_BASE_URL"])
task = json.load(open(os.environ["SWARM_TASK"]))

def post(path, body, key=os.environ["OPENAI_API_KEY"]):
    connection = http.client.HTTPConnection(URL.netloc)
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    connection.request("POST", URL.path + path, json.dumps(body), headers)
    reply = connection.getresponse()
    return reply.status, reply.read()

def reward(value):
    assert post("/rollouts/me/reward", {"reward": value, "parts": {"half": value / 2}})[0] == 200

def chat(*messages, **fields):
    status, raw = post("/chat/completions", {"messages": messages, **fields})
    found = json.loads(raw)
    if status != 200:
        print(found["error"]["message"])
        sys.exit(3)
    return found["choices"][0]

def said(role, content):
    return {"role": role, "content": content}

"""

CHATTING = """
first = said("user", task["question"])
choice = chat(first)
written = choice["message"]["content"]
if written == "die":
    raise SystemExit("I am lost")
if written == "forget":
    chat(said("user", "something else"))
if written == "lie":
    chat(first, said("assistant", "lie"), said("user", "so?"), said("assistant", "yes"))
if written == "sleep":
    time.sleep(600)
if written == "dice":
    chat(first, said("assistant", written), said("user", str(time.time())))
    reward(1.0)
    sys.exit()
if written == "crash at the limit":
    sys.exit(1)
elif choice["finish_reason"] == "length":
    reward(0.25)
elif written == "cut":
    chat(first, choice["message"], said("user", "once more"))
elif written != task["answer"]:
    again = chat(first, choice["message"], said("user", "wrong"))["message"]["content"]
    reward(0.5 if again == task["answer"] else 0.0)
else:
    reward(1.0)
"""


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def made(folder: Path, source: str = CHATTING, **options: Any) -> Environment:
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(8)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "harness.py").write_text(PROGRAM + source)
    files = {"path": str(folder / "tasks.jsonl"), "program": str(folder / "harness.py")}
    return load("harness", "1", {"seconds": 60.0, **files, **options})


def test_a_program_asks_is_answered_and_posts_the_reward(tmp_path: Path) -> None:
    environment = made(tmp_path)
    task = task_of(environment, bytes(32))
    assert isinstance(task.prompt, tuple) and re.fullmatch(r"\d \+ \d\?", task.prompt[0].content)
    assert task == task_of(environment, bytes(32))
    answer = str(2 * int(task.prompt[0].content[0]))
    wrong = (Message("user", "wrong"),)
    first, second = Episode(environment, task), Episode(environment, task)
    assert first.step("x") == second.step("y") == wrong, "two episodes of one task at once"
    assert first.step(answer) is None

    def rewarded(*texts: str, finished: bool = True) -> float:
        graded = grade(environment, task, Transcript.of(*texts, finished=finished))
        assert graded.parts in ({}, {"half": graded.reward / 2})
        return graded.reward

    assert rewarded("x", "user: wrong", answer) == 0.5, "of the process that played it"
    assert rewarded("x", "user: wrong", answer) == 0.5, "played again"
    assert rewarded(answer) == 1.0
    assert rewarded("x", finished=False) == 0.25, "the program hears of the token limit"
    assert rewarded("cut") == 0.0, "the limits of the run ended the episode"
    assert rewarded("crash at the limit", finished=False) == 0.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("forget", r"a request does not begin with what was said before; each must be"),
        ("lie", r"a request speaks for the model, which did not write that"),
    ],
)
def test_a_program_that_breaks_the_rules_ends_its_episode_with_a_sentence(
    tmp_path: Path, text: str, sentence: str
) -> None:
    environment = made(tmp_path)
    task = task_of(environment, bytes(32))
    with pytest.raises(UserError, match=rf"harness.py cannot play row \d of .*: {sentence}"):
        Episode(environment, task).step(text)


def test_a_program_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    environment = made(tmp_path)
    assert isinstance(environment, Harness)
    row = task_of(environment, bytes(32)).data["row"]
    run = environment._runs.take(lambda run: run.row == row)
    assert run is not None and run._process is not None
    with pytest.raises(UserError, match=r"cannot play row \d of .*: it took too long, and was"):
        environment._reached(row, (Answered("sleep", "stop"),), time.monotonic(), run)
    assert run._process.returncode == -signal.SIGKILL


def test_a_reward_is_never_silently_0(tmp_path: Path) -> None:
    environment = made(tmp_path)
    task = task_of(environment, bytes(32))
    assert Episode(environment, task).step("die") is None
    with pytest.raises(NotGradable, match=r"posted no reward \(status 1: I am lost\); post one"):
        grade(environment, task, Transcript.of("die"))
    said = messages_of(Episode(environment, task).step("dice") or "")[0].content
    assert grade(environment, task, Transcript.of("dice", said, "x")).reward == 1.0, "its process"
    with pytest.raises(NotGradable, match="says something else when the episode is played again"):
        grade(environment, task, Transcript.of("dice", said, "x"))


@pytest.mark.slow
def test_requests_that_no_run_can_serve_are_refused(tmp_path: Path) -> None:
    def first_words(program: str, **options: Any) -> str:
        with pytest.raises(UserError) as error:
            task_of(made(tmp_path, program, **options), bytes(32))
        return str(error.value)

    assert "temperature is 0.2: the run's manifest decides how the policy is sampled" in (
        first_words('chat(said("user", "a"), temperature=0.2)')
    )
    assert "prompt is no text" in first_words(
        'print(post("/completions", {"prompt": [1, 2]})[1]); sys.exit(1)'
    )
    assert "key is missing" in first_words('print(post("/models", {}, key="x")[1])')
    assert "/v1/images: not found" in first_words('print(post("/images", {})[1])')
    ignoring = made(tmp_path, 'chat(said("user", "a"), max_tokens=9)', sampling="ignore")
    assert task_of(ignoring, bytes(32)).prompt == (Message("user", "a"),)


def test_a_stream_and_a_text_are_served_too(tmp_path: Path) -> None:
    program = """
status, raw = post("/completions", {"prompt": "12>", "stream": True})
events = [json.loads(each[6:]) for each in raw.decode().split("\\n\\n")[:-2]]
text = "".join(each["choices"][0]["text"] for each in events)
status, raw = post("/completions", {"prompt": "12>" + text + "?"})
reward(float(json.loads(raw)["choices"][0]["text"] == text))
"""
    environment = made(tmp_path, program)
    task = task_of(environment, bytes(32))
    assert task.prompt == "12>"
    assert Episode(environment, task).step("ab") == "?"
    assert grade(environment, task, Transcript.of("ab", "?", "ab")).reward == 1.0


def test_a_program_may_give_the_model_tools(tmp_path: Path) -> None:
    program = """
tools = [{"type": "function", "function": {"name": "add"}}]
first = said("user", "1 + 1?")
choice = chat(first, tools=tools)
call = choice["message"]["tool_calls"][0]
assert choice["finish_reason"] == "tool_calls" and json.loads(call["function"]["arguments"]) == {}
result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
reward(float(chat(first, choice["message"], result, tools=tools)["message"]["content"] == "2"))
"""
    environment = made(tmp_path, program, calls="hermes")
    task = task_of(environment, bytes(32))
    assert "add" in dict(variables_of(task.prompt))["tools"][0]["function"]["name"]
    call = 'I add. <tool_call>{"name": "add", "arguments": {}}</tool_call>'
    observed = Episode(environment, task).step(call)
    assert observed is not None and [each.content for each in messages_of(observed)] == ["2"]
    assert grade(environment, task, Transcript.of(call, "tool: 2", "2")).reward == 1.0
    with pytest.raises(UserError, match="tools need the environment's option calls"):
        task_of(made(tmp_path, program), bytes(32))


def test_processes_are_bounded_and_end_with_the_environment(tmp_path: Path) -> None:
    program = f'open({str(tmp_path / "pids")!r}, "a").write(f"{{os.getpid()}}\\n")' + CHATTING
    environment = made(tmp_path, program, processes=1)
    task = task_of(environment, bytes(32))
    episodes = [Episode(environment, task) for _ in range(2)]
    assert [each.step("x") for each in episodes] == [(Message("user", "wrong"),)] * 2
    pids = [int(each) for each in (tmp_path / "pids").read_text().split()]
    assert [lives(pid) for pid in pids] == [False, True]
    assert [each.step("x") for each in episodes] == [None, None], "both are played again"
    del environment, episodes, task
    gc.collect()
    pids = [int(each) for each in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4 and not any(map(lives, pids))


def test_wrong_options_are_sentences(tmp_path: Path) -> None:
    environment = made(tmp_path)
    pins: dict[str, Any] = dict(environment.pins())
    made(tmp_path, **pins)
    with pytest.raises(UserError, match=r"program .*harness.py has the hash .*, but program_hash"):
        made(tmp_path, CHATTING + "#", **pins)
    with pytest.raises(UserError, match=r"the program /none.py is not on this machine; copy it"):
        made(tmp_path, program="/none.py")
    with pytest.raises(UserError, match=r"is neither executable nor a Python program"):
        made(tmp_path, program=str(tmp_path / "tasks.jsonl"))
    (tmp_path / "run.sh").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "run.sh").chmod(0o755)
    with pytest.raises(UserError, match=r"ended before it asked the model anything \(status 7\)"):
        task_of(made(tmp_path, program=str(tmp_path / "run.sh")), bytes(32))
