"""The environment `openenv`: honest and hostile servers of its protocol, in real processes."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from peers.engines import demo
from peers.environment.service import EnvironmentPeerService
from peers.environments import Environment, Transcript, grade, load, task_of
from peers.environments.interface import NotGradable
from peers.environments.play import Episode
from swarm.errors import UserError
from swarm.jobs.environment import DrawPrompt, EnvironmentSetup, GradeEpisode, PlayTurn
from swarm.wire.manifest import EnvironmentReference
from tests.agents.servers import game
from tests.environment.served import without
from tests.orders import submission_order

RUNNER = trio.run


def rewarded(environment: Environment, *texts: str, finished: bool = True) -> float:
    task = task_of(environment, bytes(32))
    return grade(environment, task, Transcript.of(*texts, finished=finished)).reward


def test_a_server_is_reset_stepped_and_gives_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = game(tmp_path, monkeypatch)
    task = task_of(environment, bytes(32))
    assert task.prompt == f"write {task.answer}>" and task == task_of(environment, bytes(32))
    first, second = Episode(environment, task), Episode(environment, task)
    assert first.step("x") == second.step("y") == "wrong>", "two episodes at once"
    assert first.step(task.answer) is None
    assert rewarded(environment, "x", "wrong>", task.answer) == 0.5, "as it was played"
    assert rewarded(environment, task.answer) == 1.0, "played to be graded"
    assert rewarded(environment, "x", "wrong>", "y", "wrong>", "z") == 0.0, "its turns are used up"
    assert rewarded(environment, "x", "wrong>", "y", finished=False) == 0.0, "cut at its limit"
    assert rewarded(environment, "x", finished=False) == 0.0, "the server saw nothing of it"
    with pytest.raises(NotGradable, match="says something else when the episode is played again"):
        rewarded(environment, "x", "right>", task.answer)
    with pytest.raises(NotGradable, match="says something else when the episode is played again"):
        rewarded(environment, task.answer, "wrong>", task.answer)


def test_what_a_reset_gets_and_which_reward_counts_are_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = game(tmp_path, monkeypatch, reset={"add": 5000}, reward="sum", reward_high=2.0)
    task = task_of(environment, bytes(32))
    assert int(task.answer) == task.data["index"] + 5000
    assert rewarded(environment, "x", "wrong>", task.answer) == 0.25
    whole = game(tmp_path, monkeypatch, task="", answer="", action="", observation="")
    task = task_of(whole, bytes(32))
    number = task.data["index"]
    assert task.prompt == f'{{"text": "write {number}>", "steps": 0, "number": "{number}"}}'
    episode = Episode(whole, task)
    assert episode.step("x") == "error: write one JSON object"
    assert "Field required" in str(episode.step('{"text": "x"}')), "the model's fault"
    assert episode.step(f'{{"message": "{number}"}}') is None


def test_more_episodes_than_sessions_are_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = game(tmp_path, monkeypatch, file={"sessions": 1})
    tasks = [task_of(environment, bytes([number]) * 32) for number in range(3)]
    episodes = [Episode(environment, task) for task in tasks]
    assert [each.step("x") for each in episodes] == ["wrong>"] * 3
    assert [each.step(task.answer) for each, task in zip(episodes, tasks, strict=True)] == [
        None
    ] * 3
    assert grade(environment, tasks[0], Transcript.of("x", "wrong>", tasks[0].answer)).reward == 0.5


def test_a_server_that_died_between_turns_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = game(tmp_path, monkeypatch, "die once")
    task = task_of(environment, bytes(32))
    episode = Episode(environment, task)
    assert episode.step("x") == "wrong>" and episode.step("y") == "wrong>"
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize(
    ("mode", "complaint"),
    [
        ("hang", "did not answer in time; raise seconds"),
        ("close", "closed the connection"),
        ("die", "closed the connection"),
        ("large", "sent an answer of more than 65536 bytes; raise answer_bytes in its file"),
        ("utf8", "sent no UTF-8"),
        ("other", "answers with the turn of another episode"),
        ("twice", "sent a turn that nobody had asked for"),
        ("schema", "answers with the error VALIDATION_ERROR: no field message"),
        ("raise", "answers with the error EXECUTION_ERROR: division by zero"),
        ("junk", "sent what is no JSON"),
        ("deep", "sent what is no JSON"),
        ("list", "answers a step without an observation"),
        ("reward", "gives the reward 'much'"),
        ("yes", "gives the reward True and done"),
        ("vast", "gives the reward 1000000"),
    ],
)
def test_what_a_hostile_server_does_is_a_sentence_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, complaint: str
) -> None:
    limits = {"seconds": 1.0 if mode == "hang" else 30.0, "answer_bytes": 65536}
    environment = game(tmp_path, monkeypatch, mode, file=limits)
    task = task_of(environment, bytes(32))
    began = time.monotonic()
    with pytest.raises(UserError, match=f"server 'here' .*{complaint}"):
        Episode(environment, task).step("x")
    with pytest.raises(NotGradable, match=f"server 'here' .*{complaint}"):
        rewarded(environment, "x")
    assert time.monotonic() - began < 60, "it sleeps for ten minutes"
    assert task_of(environment, bytes(32)) == task, "the server, or another, goes on"


def test_a_session_that_its_server_closed_after_an_episode_is_not_the_next_ones_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = game(tmp_path, monkeypatch, "idle once")
    task = task_of(environment, bytes(32))
    assert (tmp_path / "closed").exists()
    assert Episode(environment, task).step("x") == "wrong>"


@pytest.mark.parametrize(
    ("mode", "complaint"),
    [
        ("over", "says that an episode is over before its first turn"),
        ("head", "closed the connection .*codec can't decode"),
    ],
)
def test_a_server_without_a_first_turn_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, complaint: str
) -> None:
    with pytest.raises(UserError, match=f"server 'here' {complaint}"):
        task_of(game(tmp_path, monkeypatch, mode), bytes(32))


def test_an_action_that_is_no_json_is_never_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = game(tmp_path, monkeypatch, action="")
    episode = Episode(environment, task_of(environment, bytes(32)))
    for text in ('{"message": NaN}', '{"message": "\\ud800"}'):
        assert episode.step(text) == "error: write one JSON object"


def test_control_characters_do_not_reach_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = game(tmp_path, monkeypatch, "control")
    shown = Episode(environment, task_of(environment, bytes(32))).step("x")
    assert shown == "\ufffd[31m\ufffdred>"


@pytest.mark.parametrize(
    ("mode", "complaint"),
    [
        ("beyond", "gives the reward 2.5, outside reward_low 0 to reward_high 1; widen"),
        ("silent", "gives no reward for this episode"),
    ],
)
def test_a_reward_that_is_none_is_not_gradable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, complaint: str
) -> None:
    with pytest.raises(NotGradable, match=complaint):
        rewarded(game(tmp_path, monkeypatch, mode), "x")


def test_a_validator_for_whom_the_server_says_something_else_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two environment peers: the one plays, the other grades or takes over."""
    game(tmp_path, monkeypatch, "dice")
    shown = {"task": "{text}", "observation": "{text}", "action": "message"}
    served = EnvironmentReference(
        name="openenv", version="1", where="served", options={"server": "here", "turns": 3, **shown}
    )
    demo.make_policy(tmp_path / "policy", seed=1)
    setup = EnvironmentSetup(environments=[served], folder=str(tmp_path / "policy"))
    monkeypatch.setenv("SWARM_ENVIRONMENTS", "openenv")
    one, other = EnvironmentPeerService(setup), EnvironmentPeerService(setup)
    order = without(submission_order(max_new_tokens=32), served)
    prompt = trio.run(one.draw, DrawPrompt(order=order, group=0)).tokens
    segments = [prompt, [5, 2]]
    played = trio.run(one.play, PlayTurn(order=order, group=0, sample=0, segments=segments))
    assert played.tokens and not played.differs
    segments += [played.tokens, [6, 2]]
    again = PlayTurn(order=order, group=0, sample=0, segments=segments)
    assert trio.run(other.play, again).differs
    assert not trio.run(one.play, again).differs, "the session goes on"
    graded = trio.run(other.grade, GradeEpisode(order=order, group=0, sample=0, segments=segments))
    assert "says something else when the episode is played again" in graded.not_gradable


def test_a_server_ends_with_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = game(tmp_path, monkeypatch)
    task_of(environment, bytes(32))
    program: Any = environment
    pid = program._program.process.pid
    del program, environment
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "give it either a command or a url"),
        ('url = "ftp://x"', "url is 'ftp://x'; it must be like wss://host:8000"),
        ('url = "ws://127.0.0.1:9"\nseconds = 0', "seconds is 0: Expected `float` > 0"),
        ('adress = "x"', "unknown key 'adress'; there are: "),
        ('command = ["/no/such/program"]', "cannot be started: /no/such/program"),
        ('command = ["/bin/sh", "-c", "echo lost; exit 4"]', "ended with status 4: lost"),
        ('url = "ws://127.0.0.1:1"', "cannot be reached at 127.0.0.1:1"),
        (
            'command = ["/bin/sleep", "600"]\nstart_seconds = 0.5',
            "does not listen at 127.0.0.1:{port} after 0.5 s",
        ),
    ],
)
def test_a_wrong_file_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str
) -> None:
    monkeypatch.setenv("SWARM_SERVERS", str(tmp_path))
    (tmp_path / "here.toml").write_text(text)
    with pytest.raises(UserError) as raised:
        task_of(load("openenv", "1", {"server": "here"}), bytes(32))
    assert "server 'here'" in str(raised.value) and complaint in str(raised.value)


def test_a_server_that_this_machine_lacks_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_SERVERS", str(tmp_path))
    with pytest.raises(
        UserError, match=r"server 'there' is not known on this machine: .* write it"
    ):
        load("openenv", "1", {"server": "there"})
    with pytest.raises(UserError, match=r"server is '\.\./etc'"):
        load("openenv", "1", {"server": "../etc"})
    (tmp_path / "here.toml").write_text('url = "ws://127.0.0.1:1"')
    with pytest.raises(UserError, match="reward_high 0 is not above reward_low 0; raise it"):
        load("openenv", "1", {"server": "here", "reward_high": 0.0})
