"""Packages of `verifiers`, under the Pythons that `make test-verifiers` installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peers.environments import Transcript, grade, load, task_of
from peers.environments.chat_template import ChatTemplate
from peers.environments.interface import (
    Conversation,
    Environment,
    Message,
    NotGradable,
    ToolMessage,
    messages_of,
)
from peers.environments.play import Episode
from peers.environments.verifiers.environment import Verifiers
from swarm.errors import UserError
from swarm.world.process import HOME_VARIABLE
from tests.endpoint.test_tools import HERMES, MISTRAL
from tests.environments import verifiers_packages

pytestmark = pytest.mark.verifiers

ROOT = Path(__file__).parents[2]
OVER = Message("user", "over")


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Children find the libraries in `build/verifiers`, and our packages on their path."""
    folder = tmp_path_factory.mktemp("packages")
    verifiers_packages.write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(ROOT / "build" / "verifiers"))
        patch.setenv("PYTHONPATH", f"{ROOT}:{folder}")
        yield


def legacy(**options: Any) -> Environment:
    return load("verifiers", "1", {"package": "swarm-countdown", "library": "0.3.1", **options})


def words(**options: Any) -> Environment:
    given = {"package": "swarm-words", "tasks": 64, "reward_high": 2.0, **options}
    return load("verifiers", "1", given)


def observed(environment: Environment, *texts: str) -> list[Any]:
    episode = Episode(environment, task_of(environment, bytes(32)))
    return [episode.step(text) for text in texts]


def rewarded(environment: Environment, *texts: str, finished: bool = True) -> Any:
    transcript = Transcript.of(*texts, finished=finished)
    return grade(environment, task_of(environment, bytes(32)), transcript)


def test_an_older_package_plays_several_turns_and_grades() -> None:
    environment = legacy()
    task = task_of(environment, bytes(32))
    assert messages_of(task.prompt)[0] == Message("system", "Play.") and task.answer == "x"
    assert task == task_of(legacy(), bytes(32)), "equal in every process"
    assert observed(environment, "x", "y") == [(Message("user", "1 left"),), None]
    assert rewarded(environment, "x", "1 left", "x").reward == 0.5
    assert rewarded(environment, "x", finished=False).reward == 0.25, "cut at its limit"
    assert "broken" not in rewarded(environment, "x").parts, "a metric without weight"
    two = [Episode(environment, task) for _ in range(2)]
    assert [each.step("x") for each in two] == [(Message("user", "1 left"),)] * 2


def test_a_failure_of_an_older_package_is_never_a_reward_of_0() -> None:
    with pytest.raises(NotGradable, match=r"reward broken failed \(KeyError: 'no such column'\)"):
        rewarded(legacy(arguments='{"weight": 0.5}'), "x")
    with pytest.raises(NotGradable, match=r"judged failed \(it asks a judge, and OPENAI_API_KEY"):
        rewarded(legacy(arguments='{"kind": "judge"}'), "x")
    with pytest.raises(UserError, match="grades rollouts by comparing them; Swarm grades each"):
        rewarded(legacy(arguments='{"kind": "group"}'), "x")


def test_a_package_that_hangs_or_dies_is_killed_and_started_again() -> None:
    environment = legacy(seconds=5.0)
    with pytest.raises(UserError, match="it was still answering after 5 s and was killed"):
        observed(environment, "hang")
    with pytest.raises(NotGradable, match="it was still answering after 5 s and was killed"):
        rewarded(environment, "hang", "", "x")
    with pytest.raises(UserError, match=r"0\.3\.1: it used all of its 4096 MiB of memory"):
        observed(environment, "eat")
    with pytest.raises(UserError, match="it ended with status 3"):
        observed(environment, "die")
    assert observed(environment, "x") == [(Message("user", "1 left"),)]


def test_a_taskset_plays_interactions_stops_and_rewards() -> None:
    environment = words()
    task = task_of(environment, bytes(32))
    answer = task.answer
    assert [each.role for each in messages_of(task.prompt)] == ["system", "user"]
    no = (Message("user", "no"),)
    assert observed(environment, "a", "b", "c") == [no, no, None], "the stop condition counts turns"
    assert observed(environment, "a", answer) == [no, None]
    found = rewarded(environment, "a", "no", answer)
    assert found.reward == 1.0 and found.parts == {"exact": 2.0, "turns": 2.0, "cut": 0.0}
    cut = rewarded(environment, "a", finished=False)
    assert cut.reward == 0.0 and cut.parts["cut"] == 1.0
    with pytest.raises(NotGradable, match="KeyError"):
        rewarded(environment, "raise", "no", "raise", "no", "raise")
    with pytest.raises(NotGradable, match="gives the reward 2, outside reward_low 0 to reward_hi"):
        rewarded(words(reward_high=1.0), "a", "no", answer)


def called(name: str, **arguments: Any) -> str:
    """A call in the form of Hermes."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def counter(**options: Any) -> Verifiers:
    given = {"package": "swarm-counter", "library": "0.3.1", "calls": "hermes", **options}
    environment = load("verifiers", "1", given)
    assert isinstance(environment, Verifiers)
    return environment


def results(environment: Environment, *texts: str) -> list[Any]:
    """What tools answer to the calls in texts; None at the end."""
    return [each and [said.content for said in each] for each in observed(environment, *texts)]


def test_tools_with_state_of_an_older_package_are_called() -> None:
    environment = counter()
    task = task_of(environment, bytes(32))
    assert isinstance(task.prompt, Conversation)
    tools = json.loads(str(dict(task.prompt.variables)["tools"]))
    assert [each["function"]["name"] for each in tools] == ["double", "count"]
    assert list(tools[1]["function"]["parameters"]["properties"]) == ["by"], "no hidden argument"
    two, three = called("count", by=2), called("count", by=3)
    assert results(environment, two + three, called("double", number=4), "done") == [
        ["counter 2", "counter 5"],
        ["8"],
        None,
    ]
    (result,) = observed(environment, two)[0]
    assert isinstance(result, ToolMessage) and result.role == "tool" and result.tool_call_id
    assert results(environment, called("count", by=-1)) == [["it counts upwards only"]]
    assert "burn" in results(environment, called("burn"))[0][0], "a tool that there is not"
    whole = called("count", by=int(task.answer))
    found = rewarded(environment, whole, "counter", task.answer)
    assert found.reward == 1.0
    assert found.parts["reached"] == found.parts["said"] == found.parts["count_calls"] == 1.0
    cut = rewarded(environment, whole, finished=False)
    assert cut.parts["total_tool_calls"] == 0.0, "a call that the token limit cut off is a text"
    environment.check_template(ChatTemplate(HERMES.replace("call>", "tool_call>"), {}, "tiny"))
    with pytest.raises(UserError, match="calls is 'hermes', but tiny writes them after"):
        environment.check_template(ChatTemplate(MISTRAL, {}, "tiny"))
    with pytest.raises(UserError, match="has tools, but the option calls is 'none'; set it to"):
        task_of(counter(calls="none"), bytes(32))


def test_tools_with_state_of_a_taskset_are_called() -> None:
    given = {"package": "swarm-shelf", "reward_high": 1.5, "calls": "hermes"}
    environment = load("verifiers", "1", given)
    task = task_of(environment, bytes(32))
    one, two = called("books_put", book="a"), called("books_put", book="b")
    assert results(environment, one, two, "done") == [["a"], ["a, b"], None]
    assert "burn" in results(environment, called("burn"))[0][0]
    found = rewarded(environment, one + two, "", task.answer)
    assert found.reward == 1.0 and found.parts == {"kept": 1.0, "told": 1.0}
    assert rewarded(environment, one, "", task.answer).parts == {"kept": 0.0, "told": 1.0}


def test_several_agents_are_turns_of_one_policy() -> None:
    environment = words(player="swarm-pair")
    answer = task_of(environment, bytes(32)).answer
    asked = observed(environment, answer, "no", "b")
    review = (Message("user", f"[reviewer]\nReview a word.\n\n{answer}"),)
    assert asked == [review, (Message("user", "[writer]\nAnother."),), None]
    found = rewarded(environment, answer, "", "yes")
    assert found.parts == {"exact": 2.0, "agreed": 1.0, "turns": 1.0, "cut": 0.0}
    assert found.reward == 0.75, "the mean of 2 and 1, of at most 2"
    assert rewarded(environment, answer, "", "no", "", "b").parts["exact"] == 0.0, "its last text"


def test_a_package_of_the_registry_is_tried_several_times_by_the_librarys_environment() -> None:
    given = {"package": "marble-v1", "player": "best-of-n", "reward_low": -1.0}
    environment = load("verifiers", "1", given)
    first, second, third, end = observed(environment, "a", "b", "c", "d")
    assert first == second == third and end is None
    prompt = messages_of(task_of(environment, bytes(32)).prompt)
    assert first[0].content.startswith("[agent]\n") and prompt[-1].content in first[0].content
    assert rewarded(environment, "a", "", "b", "", "c", "", "d").parts["pass_at_n"] == 0.0


SORT = called("bash", command="sort words.txt >sorted.txt; cat sorted.txt; ls nothing")


def boxed(**options: Any) -> Verifiers:
    return counter(package="swarm-boxed", **options)


def test_a_hosted_sandbox_is_one_of_ours() -> None:
    environment = boxed()
    assert environment.replayable
    (answer,) = results(environment, SORT)[0]
    assert answer.startswith("ash\nelm\nls: cannot access 'nothing'")
    assert not environment.replayable, "a validator could not replay a command that asks the clock"
    assert rewarded(environment, SORT, answer, "done").reward == 1.0
    assert rewarded(environment, "done").reward == 0.0, "a box of its own for each episode"
    reach = "import socket; socket.create_connection(('127.0.0.1', 9))"
    ((said,),) = results(environment, called("bash", command=f'python3 -c "{reach}"; id -un'))
    assert "Operation not permitted" in said and said.endswith("nobody")
    slow = results(environment, called("bash", command="while :; do :; done"))
    assert slow == [["Error: Command timed out after 5s"]]


def test_a_python_session_lasts_from_call_to_call() -> None:
    environment = boxed(arguments='{"kind": "python", "pip_install_packages": ""}')
    first = called("python", code="import random\na = random.random()\nprint('x')\n[2, 3]")
    again = called("python", code="b = 40\na == random.Random(0).random()")
    wrong = called("python", code="1 / 0")
    last = called("python", code="b + 2")
    said = results(environment, first, again, wrong, last)
    assert said[:2] == [["x\n[2, 3]"], ["True"]] and said[3] == ["42"]
    assert said[2][0].endswith("ZeroDivisionError: division by zero")
    assert rewarded(environment, first, "", last, "", "42").reward == 1.0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ('{"kind": "python"}', "its sandbox begins with 'pip install -q numpy sympy scipy', and"),
        ('{"docker_image": "lab/own:1"}', "its sandbox needs the image 'lab/own:1'; Swarm"),
        ('{"gpu_count": 1}', "its sandbox needs a GPU"),
    ],
)
def test_a_sandbox_that_is_none_of_ours_is_refused(arguments: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        task_of(boxed(arguments=arguments), bytes(32))


def test_tasks_for_a_container_get_a_shell_in_our_sandbox() -> None:
    given = {"package": "swarm-contained", "calls": "hermes"}
    environment = load("verifiers", "1", given)
    (answer,) = results(environment, SORT)[0]
    assert answer.startswith("ash\nelm\nls: cannot access 'nothing'")
    assert answer.endswith("[exit code 2]")
    assert rewarded(environment, SORT, answer, "done").reward == 1.0
    with pytest.raises(NotGradable, match=r"has no file 'sorted\.txt'"):
        rewarded(environment, "done")
    image = {**given, "arguments": '{"image": "lab/own:1"}'}
    with pytest.raises(UserError, match="its sandbox needs the image 'lab/own:1'"):
        task_of(load("verifiers", "1", image), bytes(32))


IN_A_PEERS_CHILD = """
import os, sys
from pathlib import Path
from peers.sandbox.launcher import start_launcher
start_launcher()
from swarm.world.landlock import close_keys, version
close_keys(())
try:
    Path("~/.swarm/owner.key").expanduser().read_bytes()
    assert version() < 1, "it reads keys"
except PermissionError:
    pass
from peers.environments import load, task_of
from peers.environments.play import Episode
contained = load("verifiers", "1", {"package": "swarm-contained", "calls": "hermes"})
(said,) = Episode(contained, task_of(contained, bytes(32))).step(sys.argv[1])
contained.close()
print(said.content)
"""


def test_a_child_that_may_not_mount_uses_the_launcher_of_its_owner(tmp_path: Path) -> None:
    (tmp_path / ".swarm").mkdir()
    (tmp_path / ".swarm" / "owner.key").write_text("secret")
    said = subprocess.run(
        [sys.executable, "-c", IN_A_PEERS_CHILD, SORT],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert said.stdout.startswith("ash\nelm\nls: cannot access 'nothing'"), said.stderr


def test_a_reward_runs_a_command_in_our_sandbox() -> None:
    assert rewarded(words(arguments='{"kind": "runtime"}'), "a", "", "b").parts["ran"] == 1.0


def test_a_task_that_cannot_begin_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"ends before its prompt \(.*no such room"):
        task_of(words(arguments='{"kind": "closed"}'), bytes(32))


def test_tasks_with_one_prompt_are_split_by_index() -> None:
    environment = words(tasks=256, arguments='{"alike": true}')
    answers = {
        split: {task_of(environment, bytes([seed]) * 32, split).answer for seed in range(40)}
        for split in ("train", "held_out")
    }
    assert answers["train"] and answers["held_out"]
    assert not answers["train"] & answers["held_out"]


def test_a_missing_package_or_argument_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"package 'swarm-words' is installed in version .* wants"):
        task_of(words(version="3"), bytes(32))
    with pytest.raises(
        UserError, match=r"'no-such-package' cannot be played with verifiers 0\.4\.0: Mod"
    ):
        task_of(load("verifiers", "1", {"package": "no-such-package"}), bytes(32))
    with pytest.raises(UserError, match=r"cannot be played .*size"):
        task_of(words(arguments='{"size": 3}'), bytes(32))
