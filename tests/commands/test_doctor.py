"""`swarm doctor`: each check is a line, and one that fails says what to type."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from peers.engines.doctor import task_of
from swarm.look.health import Pulse
from swarm.wire.identity import load_or_create
from swarm.wire.manifest import EnvironmentReference
from tests.commands.harness import NOBODY, complaint, swarm


def doctor(*arguments: str | Path) -> dict[str, str]:
    """The problems that it finds, by topic."""
    outcome = swarm("doctor", "--json", *arguments)
    found = json.loads(outcome.output)
    problems = {each["topic"]: each["text"] for each in found if each["problem"]}
    assert outcome.status == bool(problems)
    return problems


def test_a_machine_without_problems(tmp_path: Path) -> None:
    home = tmp_path / "home"
    outcome = swarm("doctor", "--home", home, "--role", "relay")
    topics = [line.split()[0] for line in outcome.output.splitlines()]
    assert topics == ["program", "packages", "key", "port"]
    assert (outcome.status, outcome.errors) == (0, "")
    assert not home.exists(), "it leaves nothing behind"


def test_a_role_that_does_not_exist_is_a_problem(tmp_path: Path) -> None:
    found = doctor("--home", tmp_path, "--role", "miner")
    assert found["packages"].startswith("unknown role 'miner'; there are: bootstrap, ")


def test_each_problem_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.terminal.extras._is_installed", lambda module: module != "torch")
    key = tmp_path / "identity.key"
    load_or_create(key)
    key.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problems = doctor(
            *("--home", tmp_path, "--role", "validator", "--bootstrap", NOBODY),
            *("--listen", f"/ip4/127.0.0.1/tcp/{port}"),
        )
    assert problems.keys() == {"packages", "key", "port", "network"}
    assert "type: pip install 'swarm-rl[infer]'" in problems["packages"]
    assert f"run: chmod 600 {key}" in problems["key"]
    assert f"port {port} on 127.0.0.1 is taken" in problems["port"]
    assert "check the port, and that the peer runs" in problems["network"]


def test_an_engine_that_is_not_here_or_does_not_start(tmp_path: Path) -> None:
    missing = doctor("--home", tmp_path, "--config", written(tmp_path, 'engine = "vllm"'))
    assert "type: swarm engine install vllm" in missing["engine"]
    other = '[inference]\ninterpreter = "/bin/false"'
    broken = doctor("--home", tmp_path, "--config", written(tmp_path, other))
    assert "/bin/false does not work (status 1)" in broken["python"]


def written(folder: Path, text: str) -> Path:
    config = folder / "peer.toml"
    config.write_text(text + "\n")
    return config


def test_the_ports_of_a_running_peer_are_its_own(tmp_path: Path) -> None:
    Pulse(tmp_path, load_or_create(tmp_path / "identity.key").peer_id, ["relay"]).touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        assert not doctor("--home", tmp_path, "--role", "relay", "--listen", listen)


def test_a_home_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file" / "home"):
        (said,) = doctor("--home", home, "--role", "relay").values()
        assert said == (
            f"{home} cannot be the home, because {tmp_path / 'file'} is a file; choose another "
            "--home"
        )


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("sort-digits", "1", ""),
        ("sort-digits", "9", "is installed in version '1', but the run wants '9'"),
        ("nowhere", "1", "is not installed here"),
    ],
)
def test_the_environments_of_the_run(name: str, version: str, words: str) -> None:
    found = task_of(EnvironmentReference(name=name, version=version))
    assert found.problem == bool(words) and words in found.text


def test_settings_on_the_line_count_as_those_of_a_file(tmp_path: Path) -> None:
    limited = swarm("doctor", "--home", tmp_path, "--set", "uplink_mbps=20").output
    assert re.search(r"^uplink .*20", limited, re.M)
    said = complaint("doctor", "--home", tmp_path, "--set", "validator.threads=none")
    assert said == "settings of [validator]: threads is 'none': input should be a valid integer"
