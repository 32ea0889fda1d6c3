"""The environment `mcp`: tools of real servers, of the `mcp` library's among them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from benchmarks.agents import TOOLS
from peers.agents.servers import Program
from peers.engines.demo import make_policy
from peers.environment.service import EnvironmentPeerService
from peers.environments import Environment, Renderer, Transcript, grade, load, task_of
from peers.environments.interface import Conversation, ToolMessage, messages_of
from peers.environments.play import Episode
from peers.environments.renderer import variables_of
from swarm.errors import UserError
from swarm.jobs.environment import DrawPrompt, EnvironmentSetup, GradeEpisode, PlayTurn
from swarm.wire.manifest import EnvironmentReference
from tests.agents.servers import PIPES, call, options, write
from tests.endpoint.test_tools import HERMES
from tests.environment.served import LonePeer, without
from tests.orders import submission_order

RUNNER = trio.run

TEMPLATE = HERMES.replace("call>", "tool_call>")


def hostile(folder: Path, patch: pytest.MonkeyPatch, mode: str, **file: Any) -> Environment:
    limits = {"seconds": 1.0, "answer_bytes": 65536, **file}
    write(folder, patch, PIPES, mode=mode, **limits)
    return load("mcp", "1", options(folder))


def results(environment: Environment, *texts: str) -> list[Any]:
    """What tools give for each turn of one episode; None at its end."""
    episode = Episode(environment, task_of(environment, bytes(32)))
    found = []
    for text in texts:
        said = episode.step(text)
        found.append(None if said is None else [each.content for each in messages_of(said)])
    return found


@pytest.fixture(params=["pipes", "http"])
def library(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Environment]:
    """The tools of a server of the `mcp` library."""
    pytest.importorskip("mcp")
    if request.param == "pipes":
        write(tmp_path, monkeypatch, TOOLS)
        yield load("mcp", "1", options(tmp_path))
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:  # connections wait in its queue
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        write(tmp_path, monkeypatch, TOOLS, command=None, url=url)
        number = listener.fileno()
        command = [sys.executable, str(tmp_path / "server.py"), str(number)]
        server = subprocess.Popen(command, pass_fds=[number])
    with server:
        try:
            yield load("mcp", "1", options(tmp_path))
        finally:
            server.kill()


def test_tools_of_the_library_are_offered_called_and_answered(library: Environment) -> None:
    task = task_of(library, bytes(32))
    assert isinstance(task.prompt, Conversation)
    offered = {each["function"]["name"]: each for each in variables_of(task.prompt)["tools"]}
    assert list(offered) == ["count", "fail", "multiply"]
    assert offered["multiply"]["function"]["description"] == "The product of two numbers."
    assert set(offered["multiply"]["function"]["parameters"]["properties"]) == {"a", "b"}
    both = call("multiply", a=6, b=7) + call("count")
    assert Episode(library, task).step(both) == (
        ToolMessage("tool", "42", tool_call_id="call00000", name="multiply"),
        ToolMessage("tool", "1", tool_call_id="call00000", name="count"),
    ), "the first call of this server"
    assert results(library, call("multiply", a=2, b=3), "6") == [["6"], None]
    ((failed,),) = results(library, call("fail"))
    assert failed.startswith("error: ") and "fail" in failed
    ((wrong,),) = results(library, call("multiply", a=6))
    assert wrong.startswith("error: ") and "b" in wrong, "the model's fault, which it is told"
    ((unknown,),) = results(library, call("shell"))
    assert unknown == "error: there is no tool shell; there are: count, fail, multiply"
    graded = grade(library, task, Transcript.of(call("count"), "1", task.answer))
    assert graded.reward == 1.0 and graded.parts["tool"] == 1.0


def test_the_template_offers_the_tools_and_shows_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an environment peer renders and signs them, turn by turn."""
    write(tmp_path, monkeypatch, PIPES)
    monkeypatch.setenv("SWARM_ENVIRONMENTS", "mcp")
    make_policy(tmp_path / "policy", seed=1, positions=2048)
    (tmp_path / "policy" / "chat_template.jinja").write_text(TEMPLATE)
    given = options(tmp_path, calls="llama")
    served = EnvironmentReference(name="mcp", version="1", where="served", options=given)
    setup = EnvironmentSetup(environments=[served], folder=str(tmp_path / "policy"))
    service, renderer = EnvironmentPeerService(setup), Renderer(tmp_path / "policy")
    order = without(submission_order(max_new_tokens=128), served)
    peer = LonePeer(service)
    prompt = trio.run(service.draw, DrawPrompt(order=order, group=0)).tokens
    shown = renderer.decode_completion(prompt, ())[0]
    assert '{"type": "function", "function": {"name": "add"'.replace("_", "<unk>") in shown
    written = renderer.encode_completion('{"name": "add", "parameters": {"x": 12}}')
    segments = [prompt, [*written, 2]]
    signed, answer = trio.run(peer.answer, order, 0, segments)
    assert signed and "12!" in renderer.decode_completion(answer, ())[0]
    segments += [answer, [*renderer.encode_completion("no number"), 2]]
    assert trio.run(peer.answer, order, 0, segments)[1] == [], "the end"
    job = GradeEpisode(order=order, group=0, sample=0, segments=segments)
    graded = trio.run(service.grade, job)
    assert (graded.reward, graded.not_gradable, graded.parts["tool"]) == (0.0, "", 1.0)
    other = EnvironmentPeerService(setup)
    again = PlayTurn(order=order, group=0, sample=0, segments=segments)
    assert not trio.run(other.play, again).differs, "another peer goes on"


def test_a_template_that_writes_calls_otherwise_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, monkeypatch, PIPES)
    make_policy(tmp_path / "policy", seed=1)
    (tmp_path / "policy" / "chat_template.jinja").write_text(TEMPLATE)
    template = Renderer(tmp_path / "policy").chat.template
    wrong: Any = load("mcp", "1", options(tmp_path, calls="llama"))
    with pytest.raises(UserError, match=r"is 'llama', but .* after '<tool_call>'; give 'her"):
        wrong.check_template(template)
    right: Any = load("mcp", "1", options(tmp_path))
    right.check_template(template)


def test_plain_prompts_get_results_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, monkeypatch, PIPES, is_stateless=True, mode="stateless")
    given = options(tmp_path, offer="none", calls="llama", must_call=True, result_characters=3)
    environment = load("mcp", "1", given)
    task = task_of(environment, bytes(32))
    assert task.prompt == f"{task.answer and task.prompt}"
    episode = Episode(environment, task)
    assert episode.step('{"name": "add", "parameters": {"x": 12345}}') == "<result>123</result>"
    assert episode.step(task.answer) is None
    assert grade(environment, task, Transcript.of(task.answer)).reward == 0.0, "it called nothing"
    called = Transcript.of("call", "<result>1</result>", task.answer)
    assert grade(environment, task, called).reward == 1.0


@pytest.mark.parametrize(
    ("mode", "complaint"),
    [
        ("hang", "did not answer in time; raise seconds"),
        ("deaf", "did not answer in time; raise seconds"),
        ("die", "ended with status 4: I am lost"),
        ("red", "ended with status 4: \ufffd.31mlost"),
        ("large", "sent an answer of more than 65536 bytes"),
        ("flood", "sent an answer of more than 65536 bytes"),
        ("utf8", "sent what is no JSON"),
        ("other", "answers request 3, another's"),
        ("content", "answers a call of add without a list of contents"),
        ("refuse", "refuses what the schema of add allows: bad arguments"),
    ],
)
def test_what_a_hostile_server_does_is_a_sentence_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, complaint: str
) -> None:
    environment = hostile(tmp_path, monkeypatch, mode)
    began = time.monotonic()
    with pytest.raises(UserError, match=f"server 'here' .*{complaint}"):
        results(environment, call("add", x=1))
    assert time.monotonic() - began < 60, "it sleeps for ten minutes"
    task = task_of(environment, bytes(32))
    assert grade(environment, task, Transcript.of(task.answer)).reward == 1.0


@pytest.mark.parametrize(
    ("mode", "shown"),
    [
        ("", "1!"),
        ("raise", "error: KeyError: 'x'"),
        ("control", "\ufffd[31m\ufffdred>"),
        ("image", "1!\n[image]"),
    ],
)
def test_what_a_call_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, shown: str
) -> None:
    environment = hostile(tmp_path, monkeypatch, mode)
    assert results(environment, call("add", x=1)) == [[shown]]


def test_arguments_that_do_not_fit_are_the_models_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = hostile(tmp_path, monkeypatch, "refuse")
    wrong = results(environment, call("add"), call("add", x="1"))
    assert wrong == [["error: bad arguments"]] * 2
    for given in (float("nan"), "\ud800"):
        ((said,),) = results(environment, call("add", x=given))
        assert said.startswith("error: the arguments are no JSON"), "no server gets them"


@pytest.mark.parametrize(
    ("mode", "complaint"),
    [
        ("none", "lists tools that are none"),
        ("named", "lists tools that are none"),
        ("twice", "lists no tools, more than 128, or two of one name"),
        ("pages", "sent an answer of more than 65536 bytes"),
    ],
)
def test_a_list_that_is_none_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, complaint: str
) -> None:
    with pytest.raises(UserError, match=f"server 'here' {complaint}"):
        task_of(hostile(tmp_path, monkeypatch, mode), bytes(32))


def test_an_episode_that_loses_its_program_is_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that then give something else end the episode."""
    environment = hostile(tmp_path, monkeypatch, "", sessions=1)
    task = task_of(environment, bytes(32))
    one, other = Episode(environment, task), Episode(environment, task)
    for count in (1, 2, 3):
        for episode in (one, other):
            (said,) = messages_of(episode.step(call("add", x=5)) or ())
            assert said.content == "5" + "!" * count, "each has a server of its own"
    dice = hostile(tmp_path, monkeypatch, "dice", sessions=1)
    one, other = Episode(dice, task), Episode(dice, task)
    assert one.step(call("add", x=1)) and other.step(call("add", x=1))
    with pytest.raises(UserError, match="gives other results when calls are made again"):
        one.step(call("add", x=1))


def test_what_a_program_leaves_behind_keeps_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: Any = hostile(tmp_path, monkeypatch, "leave")
    program = Program(environment._sessions.definition)
    assert program.process.stdin is not None
    program.process.stdin.write(b'{"method": "tools/call", "params": {"arguments": {}}}\n')
    program.process.wait()
    program._listener.join(60)
    left = int(program._words)
    os.kill(left, 9)
    assert not program._listener.is_alive(), "it would wait for ten minutes"
    program.end()


def test_a_program_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: Any = hostile(tmp_path, monkeypatch, "")
    definition = environment._sessions.definition
    program = Program(definition)
    program.end()
    with pytest.raises(ProcessLookupError):
        os.kill(program.process.pid, 0)
