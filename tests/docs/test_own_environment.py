"""The tutorial of docs/own-environment.md: its commands are typed, in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.demo.chat_model import make_chat_model
from tests.docs.pages import section, text

PAGE = section(text("docs/own-environment.md"), "Write one in ten minutes")
STEPS = "--steps 3"
MODULE = "word-mirror/word_mirror.py"


@dataclass(frozen=True)
class Typed:
    """A command of the page, with the output that stands below it."""

    command: str
    output: str


@dataclass(frozen=True)
class Edited:
    """A method that replaces the one of its name in the environment's file."""

    method: str


def actions() -> Iterator[Typed | Edited]:
    """What the page tells to do, in order."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S):
        if language == "python" and block.startswith("    def "):
            yield Edited(block)
        elif language != "python":
            for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
                yield Typed(command, output)


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """Variables of a shell in which a new environment, with all that is installed here besides, is
    active; `pip` installs without a network."""
    python = tmp_path / ".venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", python.parents[1]], check=True)
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = Path(subprocess.check_output(asked, text=True).strip())
    # Its own packages may be an editable installation, whose finder is started by a .pth file.
    (site / "here.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
    )
    modules = {"swarm": "swarm.commands.main", "pytest": "pytest", "pip": "pip"}
    for name, module in modules.items():
        (python.parent / name).write_text(f'#!/bin/sh\nexec "{python}" -m {module} "$@"\n')
        (python.parent / name).chmod(0o755)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_CACHE_DIR": str(tmp_path)}
    return {**os.environ, **pip, "PATH": path, "HOME": str(tmp_path)}


def replaced(source: str, method: str) -> str:
    """The source with another method of the same name; each ends before a blank line."""
    (name,) = re.findall(r"^    def (\w+)\(", method, re.M)
    found, count = re.subn(rf"    def {name}\(.*?\n(?=\n)", method, source, flags=re.S)
    assert count == 1
    return found


@pytest.mark.slow
def test_its_lines_lead_to_a_swarm_that_learns_the_task(
    shell: dict[str, str], tmp_path: Path
) -> None:
    """Demos are cut to a few steps, and the model that people know is a small one made here."""
    model = make_chat_model(tmp_path / "model")
    for action in actions():
        if isinstance(action, Edited):
            path = tmp_path / MODULE
            path.write_text(replaced(path.read_text(), action.method))
            continue
        command = re.sub(r"--steps \d+", STEPS, action.command)
        command = re.sub(r"--model \w+/\S+", f"--model {model}", command)
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=shell, capture_output=True, text=True
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        for line in action.output.splitlines():
            shown = re.escape(line).replace("…", ".*")
            assert STEPS in command or re.search(f"^{shown}$", done.stdout, re.M), (line, done)
