"""The package of docs/extending.md: installed as it stands there, and tried beside a demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.docs.pages import ROOT


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which the page's package is installed."""
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    (project,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    site = tmp_path / "site"
    info = site / "swarm_hello-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: swarm-hello\nVersion: 0.1\n")
    groups = tomllib.loads(project)["project"]["entry-points"]
    (info / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in found.items())
            for group, found in groups.items()
        )
    )
    (site / "swarm_hello.py").write_text(program)
    return os.environ | {"PYTHONPATH": str(site), "HOME": str(tmp_path)}


def swarm(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "swarm.commands.main", *arguments]


@contextmanager
def peer(environment: dict[str, str], folder: Path, *arguments: str) -> Iterator[IO[str]]:
    """Run a command in the background inside the block; yields its output."""
    with subprocess.Popen(
        swarm(*arguments), env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.terminate()
            process.wait(60)


def test_its_command_is_listed_and_a_mistake_is_a_sentence(environment: dict[str, str]) -> None:
    listed = subprocess.run(swarm("--help"), env=environment, capture_output=True, text=True)
    assert "Print the number of peers of a run." in listed.stdout
    failed = subprocess.run(swarm("hello"), env=environment, capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.startswith("error: which network?")


@pytest.mark.slow
def test_its_role_joins_a_demo_and_its_command_counts(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with peer(environment, tmp_path, "demo", "--steps", "400") as demo:
        address = next(
            found[1] for line in demo if (found := re.search(r"--bootstrap (\S+)", line))
        )
        given = ["--home", str(tmp_path / "hello"), "--bootstrap", address]
        with peer(environment, tmp_path, "peer", "--role", "hello", *given) as said:
            steps = (int(line.split()[1]) for line in said if line.startswith("step "))
            assert next(steps) < next(steps)
        command = swarm("hello", "--bootstrap", address)
        counted = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert re.fullmatch(r"[6-9] peers\n", counted.stdout), counted
