"""Output that cannot be encoded, that nobody reads, or of a user without a home: no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SWARM = [sys.executable, "-m", "swarm.commands.main"]


def ran(
    *arguments: str, environment: dict[str, str] | None = None, command: list[str] = SWARM
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, where its streams are the operating system's."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [*command, *arguments],
        env=clean | (environment or {}),
        capture_output=True,
        encoding="latin-1",
        timeout=60,
    )


@pytest.mark.parametrize("encoding", ["iso-8859-1", "ascii"])
@pytest.mark.parametrize("command", ["status", "why"])
def test_help_in_a_locale_without_its_characters(encoding: str, command: str) -> None:
    found = ran(command, "--help", environment={"PYTHONIOENCODING": encoding})
    assert found.returncode == 0 and not found.stderr, found.stderr
    assert "--bootstrap" in found.stdout


def test_an_error_in_a_locale_without_its_characters() -> None:
    found = ran("why", "\u2713", environment={"PYTHONIOENCODING": "iso-8859-1:strict"})
    assert found.returncode == 2
    assert found.stderr.startswith("error: ") and found.stderr.count("\n") == 1, found.stderr


@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_reader_who_has_seen_enough(buffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(
        [*SWARM, "demo", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": buffered},
    ) as process:
        os.close(writing)
        _, said = process.communicate(timeout=60)
    assert said == ""
    assert process.returncode in (0, 1)


HOMELESS = """
import os, sys
os.environ.pop("HOME", None)
import pwd
def nobody(*_): raise KeyError
pwd.getpwuid = nobody  # as for a user id that the list of users lacks
from swarm.commands.main import main
main()
"""


@pytest.mark.slow
def test_a_user_without_a_home(tmp_path: Path) -> None:
    homeless = [sys.executable, "-c", HOMELESS]
    assert ran("status", "--help", command=homeless).returncode == 0
    worker = ["peer", "--role", "inference", "--bootstrap", "/ip4/127.0.0.1/tcp/1"]
    for command in (["status"], worker, ["ledger"], ["doctor"]):
        found = ran(*command, command=homeless)
        assert found.returncode == 2, found.stderr
        assert found.stderr.startswith("error: ") and "give --home FOLDER" in found.stderr
    assert ran("id", "--home", str(tmp_path / "home"), command=homeless).returncode == 0
