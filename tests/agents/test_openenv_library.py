"""Servers of the `openenv` library, under the Python that `make test-openenv` installs: the echo
package that `openenv init` writes, and one that runs programs by the library's executor."""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from benchmarks.agents import OPENENV_OPTIONS, PROGRAMS, write_server
from benchmarks.recipe import Sampler, train
from peers.agents.servers import FOLDER_VARIABLE
from peers.demo.recipes import OBJECTIVE, OPTIMISER, SAMPLING, SCHEDULE
from peers.engines.demo import make_policy
from peers.environments import Environment, Transcript, grade, load, task_of
from peers.environments.play import Episode
from peers.environments.verifiers.installed import recipe_of
from peers.learning.learner import Learner
from peers.learning.settings import LearnerSettings

pytestmark = pytest.mark.openenv

HOME = Path(__file__).parents[2] / "build" / "openenv"
PYTHON = recipe_of("", "openenv").folder(HOME) / "bin" / "python"


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of both servers."""
    subprocess.run(
        [PYTHON, "-m", "openenv.cli", "init", "echo_env", "--output-dir", tmp_path],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    write_server(tmp_path, "programs", PROGRAMS, PYTHON, "{port}")
    echo = ["-m", "echo_env.server.app", "--host", "127.0.0.1", "--port", "{port}"]
    words = json.dumps([str(PYTHON), *echo])
    (tmp_path / "echo.toml").write_text(f'command = {words}\nfolder = "{tmp_path}"\nsessions = 1\n')


def echo() -> Environment:
    given = {"server": "echo", "action": "message", "task": "echo>", "tasks": 64}
    return load("openenv", "1", given)


def programs(turns: int) -> Environment:
    given = {**OPENENV_OPTIONS, "turns": turns, "observation": "{stdout}{stderr}>"}
    return load("openenv", "1", given)


def learned(folder: Path, environment: Environment, steps: int) -> list[float]:
    """Mean rewards by step of a policy of random weights that learns."""
    make_policy(folder / "0", seed=1)
    schedule = replace(SCHEDULE, steps=steps, groups_per_step=8)
    optimiser = replace(OPTIMISER, learning_rate=4e-3, warmup_steps=2)
    settings = LearnerSettings(OBJECTIVE, schedule, 1, optimiser=optimiser)
    sampler = Sampler(folder / "0", [environment], replace(SAMPLING, max_new_tokens=8))
    learner = Learner(folder / "0", settings)
    return train(learner, sampler, folder, 1, schedule)[0]


@pytest.mark.usefixtures("servers")
def test_the_librarys_echo_package_is_played_and_trained(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    environment = echo()
    task = task_of(environment, bytes(32))
    assert task.prompt == "echo>" and Episode(environment, task).step("hello") is None
    assert grade(environment, task, Transcript.of("hello")).reward == 0.5
    assert grade(environment, task, Transcript.of("hello", finished=False)).reward == 0.0
    rewards = learned(tmp_path, environment, 16)
    assert statistics.fmean(rewards[-3:]) > 2 * statistics.fmean(rewards[:3]), rewards


@pytest.mark.usefixtures("servers")
def test_a_package_that_runs_programs_is_played_and_trained(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    environment = programs(turns=3)
    task = task_of(environment, bytes(32))
    left, word, right = str(task.prompt).rstrip(">").split()
    signs = {"plus": "+", "minus": "-", "times": "*"}
    assert task.answer == f"{left}{signs[word]}{right}"
    episode = Episode(environment, task)
    assert "division by zero" in str(episode.step("x = 3; 1 / 0"))
    assert str(episode.step(f"print('no')\nx + {left} - 3")).startswith("no\n"), "x is known"
    assert episode.step(task.answer) is None
    graded = grade(environment, task, Transcript.of(task.answer))
    assert graded.reward == 1.0
    assert grade(environment, task, Transcript.of("1")).reward == 0.2
    assert grade(environment, task, Transcript.of("1 +")).reward == 0.0
    rewards = learned(tmp_path, programs(turns=1), 16)
    assert statistics.fmean(rewards[-3:]) > 2 * statistics.fmean(rewards[:3]), rewards
