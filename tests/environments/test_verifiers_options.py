"""The environment `verifiers` without the library: options, its child process, the conversation."""

from __future__ import annotations

import asyncio
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peers.engines.installed import Installed, python_of, record_of
from peers.environments import load, task_of
from peers.environments.graders.pool import Overdue, Pool, ProcessFailed
from peers.environments.verifiers.child.episode import (
    Episode,
    EpisodeOver,
    Graded,
    Said,
    Spoken,
    Unplayable,
)
from peers.environments.verifiers.installed import CHILD_NEEDS, RECIPES, recipe_of
from swarm.errors import UserError
from swarm.world.process import HOME_VARIABLE
from tests.commands.harness import complaint
from tests.engines.test_installed import ROOT


def script(path: Path, program: str) -> Path:
    """Write a program that is started in place of a Python."""
    path.write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
    path.chmod(0o700)
    return path


JUNK = 'import os, sys; os.write(int(sys.argv[4]), bytes(3) + b"\\1\\1"); sys.stdin.read()'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose "verifiers" are this Python, which lacks the library."""
    recipe = recipe_of("0.4.0")
    folder = recipe.folder(tmp_path)
    python_of(folder).parent.mkdir(parents=True)
    script(python_of(folder), f'exec {sys.executable} "$@"')
    made = Installed(requirements=recipe.requirements, complete=True)
    record_of(folder).write_bytes(msgspec.json.encode(made))
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "options: package is missing"),
        ({"package": ""}, "plays a package; name one with the option package"),
        ({"package": "p", "library": "0.2.0"}, "options.*library.*'0.2.0'"),
        ({"package": "p", "arguments": "[1]"}, r"arguments '\[1\]' is no JSON object; write it"),
        ({"package": "p", "arguments": "{"}, "is no JSON object"),
        ({"package": "p", "tasks": 0}, "options.*tasks"),
        ({"package": "p", "reward_low": 1.0}, "reward_high 1 is not above reward_low 1; raise it"),
        ({"package": "p", "library": "0.3.1"}, "type: swarm environment install verifiers@0.3.1"),
    ],
)
def test_a_wrong_option_is_a_sentence(options: Any, sentence: str, home: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        load("verifiers", "1", options)


def test_a_package_that_cannot_be_loaded_is_a_sentence(home: Path) -> None:
    environment = load("verifiers", "1", {"package": "chess"})
    sentence = "package 'chess' cannot be played with verifiers 0.4.0: .*No package metadata"
    for _ in range(2):  # a child that failed to load is started again
        with pytest.raises(UserError, match=sentence):
            task_of(environment, bytes(32))


def test_a_child_that_hangs_dies_or_does_not_start_is_a_sentence(tmp_path: Path) -> None:
    def asked(program: str | None, start_seconds: float = 60.0) -> None:
        python = tmp_path / "python"
        if program is not None:
            script(python, program)
        pool = Pool("x:X", 1.0, interpreter=python, start_seconds=start_seconds)
        try:
            pool.ask({"what": "opened"})
        finally:
            pool.close()

    with pytest.raises(ProcessFailed, match=r"cannot be started \(No such file"):
        asked(None)
    with pytest.raises(ProcessFailed, match="ended with status 0, and said: no such thing"):
        asked("echo no such thing >&2")
    with pytest.raises(Overdue, match=r"still loading its library after 0.2 s and was killed"):
        asked("exec sleep 60", start_seconds=0.2)
    with pytest.raises(ProcessFailed, match="it sent no reply"):
        asked(f"exec {sys.executable} -c '{JUNK}' \"$@\"")


def conversation(*requests: list[Said], texts: list[str | None]) -> list[Any]:
    """What an owner hears who gives `texts` to an environment that makes these requests."""

    async def play(episode: Episode) -> Graded:
        for request in requests:
            try:
                await episode.ask(request)
            except EpisodeOver:
                return Graded(0.5, {})
        return Graded(1.0, {})

    async def own() -> list[Any]:
        episode = Episode(play)
        heard: list[Any] = []
        for text in texts:
            heard.append(await episode.asked())
            episode.say(None if text is None else Spoken(text, finished=True))
        heard.append(await episode.asked() or await episode.graded())
        await episode.close()
        return heard

    return asyncio.run(own())


ASKED = Said("user", "1+1")
SAID = Said("assistant", "2")
MORE = Said("user", "and 2+2")


def test_an_owner_hears_what_is_new_in_each_request() -> None:
    requests = ([ASKED], [ASKED, SAID, MORE])
    assert conversation(*requests, texts=["2", "4"]) == [[ASKED], [MORE], Graded(1.0, {})]
    assert conversation(*requests, texts=["2", None]) == [[ASKED], [MORE], Graded(0.5, {})]
    assert conversation(*requests, texts=[None]) == [[ASKED], Graded(0.5, {})]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ([MORE], "rewrites what was said before"),
        ([ASKED, Said("assistant", "3"), MORE], "rewrites what was said before"),
        ([ASKED, SAID], "asks for two texts in a row"),
    ],
)
def test_an_environment_cannot_take_back_what_was_said(second: list[Said], sentence: str) -> None:
    with pytest.raises(Unplayable, match=sentence):
        conversation([ASKED], second, texts=["2", "4"])


def test_the_recipes_have_the_projects_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(CHILD_NEEDS) <= {
        *project["dependencies"],
        *project["optional-dependencies"]["infer"],
    }
    for version, recipe in RECIPES.items():
        assert recipe.steps[0] == (f"verifiers=={version}",)


def test_wrong_arguments_of_the_installation(tmp_path: Path) -> None:
    command = ("environment", "install")
    said = complaint(*command, "gym")
    assert said == "library 'gym' cannot be installed; there are: verifiers, openenv"
    said = complaint(*command, "verifiers@9", "--home", tmp_path)
    assert said == "verifiers '9' cannot be installed; there are: 0.4.0, 0.3.1"
    said = complaint(*command, "verifiers", "--package", "-r x", "--home", tmp_path)
    assert said.startswith("--package '-r x' is no package; write one like marble-v1==0.1.0")
    assert not (tmp_path / "environments").exists()
