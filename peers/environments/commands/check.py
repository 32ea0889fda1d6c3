"""What `swarm environment` does: `check` an environment for a run, write a `new` one, `try` it.

A check runs its code in two child processes, which hash text differently, as two machines do: an
environment that iterates over a set is found out.
"""

from __future__ import annotations

import keyword
import os
import re
import statistics
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from peers.evaluation.run import SERVICE, Evaluation, draw, play_rows
from swarm.errors import UserError
from swarm.jobs.environment import (
    Describe,
    Described,
    DrawTrial,
    Findings,
    GradeTrial,
    TrialDrawn,
    TrialGraded,
    TrialService,
    TrialSetup,
)
from swarm.jobs.evaluation import EvaluationSetup, Sample
from swarm.look.rollouts.screen import GROUP_MARK, turn_lines
from swarm.look.rollouts.seen import Turn
from swarm.rollouts.rollout import Kind
from swarm.terminal.output import removed_on_failure
from swarm.world import ChildDied, ChildError, ChildUserError, client
from swarm.world.compute import LocalCompute

TRIAL = "peers.environments.trial:Trial"

MEMORY_BYTES_MAX = 8 << 30
"""Memory of each child process."""

GROWTH_BYTES_MAX = 256 << 20
"""Growth of a process's memory that is warned of."""

REPEATED_MAX = 3
"""Warnings of a kind that are shown."""


@dataclass
class Part:
    """What one process found."""

    described: Described | None = None
    drawn: TrialDrawn = field(default_factory=TrialDrawn)
    graded: TrialGraded = field(default_factory=TrialGraded)
    faults: list[str] = field(default_factory=list)
    """Why it did not finish."""


@dataclass(frozen=True)
class Checked:
    """The results of both processes."""

    environment: str
    parts: list[Part]
    """Of one process if that found faults, else of two."""

    @property
    def faults(self) -> list[str]:
        found = [
            sentence
            for part in self.parts
            for sentence in (*part.drawn.faults, *part.graded.faults, *part.faults)
        ]
        found += [
            f"environment {self.environment!r}: {part.graded.not_gradable} completions are not "
            "gradable, so a run would quarantine their groups; repair the rows that the warnings "
            "name, or the environment"
            for part in self.parts[:1]
            if part.graded.not_gradable
        ]
        return found or list(self._differences())

    @property
    def warnings(self) -> list[str]:
        part = self.parts[0]
        found = list(dict.fromkeys([*part.drawn.warnings, *part.graded.warnings]))
        more = len(found) - REPEATED_MAX
        found = [*found[:REPEATED_MAX], *([f"… and {more} more such answers"] if more > 0 else [])]
        rewards = part.graded.answer_rewards
        if rewards and min(rewards) < 1:
            found.append(
                f"{sum(each < 1 for each in rewards)} of {len(rewards)} answers earn less than 1: "
                "a policy that learns them learns too little"
            )
        if part.graded.grown_bytes > GROWTH_BYTES_MAX:
            found.append(
                f"memory grew by {part.graded.grown_bytes >> 20} MiB while "
                f"{len(part.graded.grade_seconds)} completions were graded; a validator grades "
                "millions"
            )
        if part.drawn.held_out_share == 0:
            found.append("no prompt is held out, so `swarm eval` has no tasks; add prompts")
        return found

    def _differences(self) -> Iterator[str]:
        """A sentence about the first call whose result differs between the processes."""
        here, there = _answers(self.parts[0]), _answers(self.parts[-1])
        for what in here:
            if what in there and here[what] != there[what]:
                yield (
                    f"environment {self.environment!r} gives {what} differently in another process "
                    f"({here[what]:.40} and {there[what]:.40}); sort what comes from a set, and "
                    "never use hash(), a clock or the global random state"
                )
                return


def _answers(part: Part) -> dict[str, str]:
    findings: Sequence[Findings] = (part.drawn, part.graded)
    return {what: result for each in findings for what, result in each.answers}


async def check(setup: TrialSetup, tasks: int, graded: int) -> Checked:
    """Try an environment in two processes; raises `UserError` if it cannot be loaded."""
    checked = Checked(setup.environment, [])
    for hash_seed in ("1", "2"):
        with _hash_seed(hash_seed):
            checked.parts.append(await _try(setup, tasks, graded))
        if checked.faults:
            break
    return checked


async def _try(setup: TrialSetup, tasks: int, graded: int) -> Part:
    part, at = Part(), "was loaded"
    try:
        async with LocalCompute().child(
            TRIAL, setup, name="environment", memory_limit_bytes=MEMORY_BYTES_MAX
        ) as child:
            service = client(TrialService, child)
            part.described = await service.describe(Describe())
            at = "drew tasks"
            part.drawn = await service.draw(DrawTrial(tasks=tasks))
            if not part.drawn.faults:
                at = "graded"
                part.graded = await service.grade(GradeTrial(tasks=graded))
    except ChildUserError as error:
        raise UserError(str(error).removeprefix("environment: ")) from error
    except (ChildDied, ChildError) as error:
        part.faults.append(
            f"the process of environment {setup.environment!r} ended while it {at}: {error}; "
            "a validator would lose its process, too"
        )
    return part


@contextmanager
def _hash_seed(seed: str) -> Iterator[None]:
    """Let children hash text with a seed of their own."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = seed
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


# --- the report --------------------------------------------------------------------------------


def figures(checked: Checked) -> dict[str, Any]:
    """The figures of a trial by name, as text for people."""
    part = checked.parts[0]
    drawn, graded = part.drawn, part.graded
    described = part.described or Described(version="?", several_turns=False, call_seconds=0.0)
    share = drawn.held_out_share
    found = {
        "environment": f"{checked.environment} {described.version}, "
        + ("several turns" if described.several_turns else "single turns"),
        "tasks": f"{len(drawn.seconds)} training tasks, {drawn.different} different prompts",
        "held out": "unknown" if share is None else f"{share:.1%} of the prompts",
        "prompt tokens": spread(drawn.prompt_tokens, "", 0),
        "answer tokens": spread(drawn.answer_tokens, "", 0),
        "probe hash": drawn.probe_hash,
        "reward of answers": spread(graded.answer_rewards, "", 3) or "no answers are known",
        "reward of junk": spread(graded.junk_rewards, "", 3),
        "parts of rewards": ", ".join(graded.parts),
        "not gradable": f"{graded.not_gradable} completions" if graded.not_gradable else "",
        "draw": spread([1e3 * each for each in drawn.seconds], " ms", 3),
        "grade": spread([1e3 * each for each in graded.grade_seconds], " ms", 3),
        "observation": spread([1e3 * each for each in graded.step_seconds], " ms", 3),
        "memory growth": f"{graded.grown_bytes / (1 << 20):.1f} MiB",
    }
    return {name: text for name, text in found.items() if text}


def spread(values: Sequence[float], unit: str, digits: int) -> str:
    """Median, 10th to 90th percentile, and maximum; empty without values."""
    if not values:
        return ""
    middle = statistics.median(values)
    low, high = _percentile(values, 0.1), _percentile(values, 0.9)
    return (
        f"{middle:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f}, at most "
        f"{max(values):.{digits}f})"
    )


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


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


async def play(policy: Path, wanted: Evaluation) -> list[Sample]:
    """Samples of the only environment, task by task; raises `UserError`."""
    [environment] = wanted.environments
    setup = EvaluationSetup(
        folder=str(policy), environments=[environment], allowed=(environment.name,)
    )
    async with LocalCompute().child(SERVICE, setup, name="environment") as child:
        drawn = await draw(child, wanted)
        rows = range(drawn.tasks[0] * wanted.samples)
        async with play_rows(child, wanted, drawn, 0, rows) as samples:
            found = [sample async for sample in samples]
    return sorted(found, key=lambda sample: sample.row)


def lines(wanted: Evaluation, samples: list[Sample], width: int | None) -> Iterator[Text]:
    """The lines of the samples; those of a task follow each other below its prompt."""
    [environment] = wanted.environments
    name = f"{environment.name} {environment.version}"
    for sample in samples:
        number = sample.row % wanted.samples
        if number == 0:
            yield Text(f"{GROUP_MARK} {name}  task {sample.row // wanted.samples}", "bold")
            yield from turn_lines(_turn("prompt", sample.turns[0]), width)
        parts = ", ".join(f"{part} {value:.4g}" for part, value in sorted(sample.parts.items()))
        reward = f"reward {sample.reward:.4g}" + (f" ({parts})" if parts else "")
        end = "stop" if sample.finished else "length"
        shown = f"   sample {number}  {reward}  {sample.tokens:,} tokens  {end}"
        yield Text(shown, "cyan")
        for index, text in enumerate(sample.turns[1:]):
            yield from turn_lines(_turn("environment" if index % 2 else "model", text), width)


def _turn(kind: Kind, text: str) -> Turn:
    return Turn(kind, [], text, None, None, (), in_loss=kind == "model")
