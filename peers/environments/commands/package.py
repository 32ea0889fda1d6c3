"""`swarm environment new`: the files of a package with a small environment."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Collection
from pathlib import Path

from swarm.errors import UserError
from swarm.terminal.output import removed_on_failure

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
NAME_CHARACTERS_MAX = 40
OWN_PACKAGES = ("swarm", "peers", "simnet")
"""Importable names that a module of the new package must not shadow."""

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

# Swarm itself must be installed too.
[project]
name = "{name}"
version = "1"
description = "An environment for Swarm"
requires-python = ">=3.11"

[project.entry-points."swarm.environments"]
{name} = "{module}:{cls}"

[tool.setuptools]
py-modules = ["{module}"]
"""

MODULE = '''\
"""Turn a word around: `abc>` asks for `cba`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from peers.environments import Generated, SingleTurn, Task, Tasks, Transcript


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a run may set under `options`."""

    letters: Annotated[int, msgspec.Meta(ge=1, le=16)] = 5


class {cls}(SingleTurn):
    """Rewards the word backwards."""

    name = "{name}"
    version = "1"  # Give it a new one when a task or a reward changes.
    Options = Options
    options: Options

    def tasks(self) -> Tasks:
        return Generated(self._make)

    def grade(self, task: Task, transcript: Transcript) -> float:
        # The text comes from a model: anything may be in it. Never raise; give 0.
        return float(transcript.finished and transcript.text.strip() == task.answer)

    def _make(self, randomness: bytes) -> Task:
        # All randomness comes from these 32 bytes, so that every machine draws the same task.
        word = "".join(chr(ord("a") + byte % 26) for byte in randomness[: self.options.letters])
        return Task(prompt=f"{{word}}>", answer=word[::-1])
'''

TEST = '''\
"""Run it with `pytest`."""

from {module} import {cls}

from peers.environments import Grade, Transcript, grade, task_of


def test_the_answer_and_nothing_else_is_rewarded():
    environment = {cls}()
    task = task_of(environment, b"any seed")
    assert task == task_of({cls}(), b"any seed")
    assert grade(environment, task, Transcript.of(task.answer)) == Grade(1.0)
    assert grade(environment, task, Transcript.of(task.answer, finished=False)) == Grade(0.0)
    for junk in ("", "\\x00", "x" * 10_000):
        assert grade(environment, task, Transcript.of(junk)) == Grade(0.0)
'''

README = """\
# {name}

An environment for Swarm. Install it wherever the run's trainer, validators and workers are:

```
pip install -e .
pytest
swarm environment check {name}
```

In a run's TOML file:

```toml
[[environments]]
name = "{name}"
version = "1"
options = {{letters = 5}}
```
"""


def write_package(name: str, folder: Path, built_in: Collection[str]) -> list[Path]:
    """Write a package with an environment `name` into a new folder; raises `UserError`.

    It must not have the name of an environment in `built_in`.
    """
    module = name.replace("-", "_")
    if not NAME.fullmatch(name) or len(name) > NAME_CHARACTERS_MAX:
        raise UserError(
            f"NAME is {name!r}; use lower-case letters, digits and single hyphens, at most "
            f"{NAME_CHARACTERS_MAX}, such as word-chain"
        )
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise UserError(f"NAME is {name!r}, which is a name of Python's own; choose another")
    if module in OWN_PACKAGES:
        raise UserError(f"NAME is {name!r}, which is a package of Swarm's own; choose another")
    if name in built_in:
        raise UserError(
            f"NAME is {name!r}, which is built into Swarm and would hide yours; choose another"
        )
    if folder.exists():
        raise UserError(f"{folder} exists already; give --folder the name of a new one")
    words = {"name": name, "module": module, "cls": module.title().replace("_", "")}
    texts = {
        "pyproject.toml": PYPROJECT,
        f"{module}.py": MODULE,
        f"test_{module}.py": TEST,
        "README.md": README,
    }
    try:
        with removed_on_failure(folder):
            folder.mkdir(parents=True)
            for path, text in texts.items():
                (folder / path).write_text(text.format(**words), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror})") from error
    return [folder / path for path in texts]
