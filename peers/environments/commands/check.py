"""What `swarm environment` does: `check` an environment for a run, and write a `new` one.

A check runs its code in two child processes, which hash text differently, as two machines do: an
environment that iterates over a set is found out."""

import keyword
import os
import re
import statistics
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from swarm.errors import UserError
from swarm.jobs.environment import TrialService, TrialSetup, Tried, TryEnvironment
from swarm.terminal.output import removed_on_failure
from swarm.world import ChildDied, ChildError, ChildUserError, client
from swarm.world.compute import LocalCompute

TRIAL = "peers.environments.trial:Trial"

MEMORY_BYTES_MAX = 8 << 30
"""Memory of each child process."""

REPEATED_MAX = 3
"""Warnings of a kind that are shown."""


async def check(setup: TrialSetup, tasks: int, graded: int) -> Tried:
    """Try an environment in two processes; raises `UserError` if it cannot be loaded.

    Returns the findings of the first, and the faults of both."""
    job, where = TryEnvironment(tasks=tasks, graded=graded), f"environment {setup.environment!r}"
    first = await _try(setup, job, "1")
    if first.not_gradable:
        first.faults.append(
            f"environment {setup.environment!r}: {first.not_gradable} completions are not "
            "gradable, so a run would quarantine their groups; repair the rows that the warnings "
            "name, or the environment"
        )
    if not first.faults:
        second = await _try(setup, job, "2")
        first.faults = second.faults or _differences(where, dict(first.answers), second)
    first.warnings = _warnings(first)
    return first


async def _try(setup: TrialSetup, job: TryEnvironment, hash_seed: str) -> Tried:
    try:
        with _hash_seed(hash_seed):
            async with LocalCompute().child(
                TRIAL, setup, name="environment", memory_limit_bytes=MEMORY_BYTES_MAX
            ) as child:
                return await client(TrialService, child).play(job)
    except ChildUserError as error:
        raise UserError(str(error).removeprefix("environment: ")) from error
    except (ChildDied, ChildError) as error:
        sentence = (
            f"the process of environment {setup.environment!r} ended while it was tried: {error}; "
            "a validator would lose its process, too"
        )
        return Tried(faults=[sentence])


def _differences(where: str, here: dict[str, str], second: Tried) -> list[str]:
    """A sentence about the first call whose result differs between the processes."""
    for what, there in second.answers:
        if what in here and here[what] != there:
            return [
                f"{where} gives {what} differently in another process ({here[what]:.40} and "
                f"{there:.40}); sort what comes from a set, and never use hash(), a clock or the "
                "global random state"
            ]
    return []


def _warnings(tried: Tried) -> list[str]:
    found = list(dict.fromkeys(tried.warnings))
    more = len(found) - REPEATED_MAX
    found = [*found[:REPEATED_MAX], *([f"… and {more} more such answers"] if more > 0 else [])]
    low = sum(each < 1 for each in tried.answer_rewards)
    if low:
        found.append(
            f"{low} of {len(tried.answer_rewards)} answers earn less than 1: a policy that learns "
            "them learns too little"
        )
    return found


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


def figures(name: str, tried: Tried) -> dict[str, str]:
    """The figures of a trial by name, as text for people."""
    turns = "several turns" if tried.several_turns else "single turns"
    found = {
        "environment": f"{name} {tried.version}, {turns}",
        "tasks": f"{tried.different} different prompts of training tasks",
        "prompt tokens": spread(tried.prompt_tokens, 0),
        "answer tokens": spread(tried.answer_tokens, 0),
        "probe hash": tried.probe_hash,
        "reward of answers": spread(tried.answer_rewards, 3) or "no answers are known",
        "reward of junk": spread(tried.junk_rewards, 3),
        "parts of rewards": ", ".join(tried.parts),
        "not gradable": f"{tried.not_gradable} completions" if tried.not_gradable else "",
    }
    return {name: text for name, text in found.items() if text}


def spread(values: Sequence[float], digits: int) -> str:
    """Median, 10th to 90th percentile, and maximum; empty without values."""
    if not values:
        return ""
    ordered, last = sorted(values), len(values) - 1
    low, high = (ordered[min(last, int(share * len(values)))] for share in (0.1, 0.9))
    return (
        f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f}, at most "
        f"{ordered[-1]:.{digits}f})"
    )


NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
NAME_CHARACTERS_MAX = 40
OWN_PACKAGES = ("swarm", "peers", "simnet")
"""Importable names that a module of the new package must not shadow."""

TEMPLATES = Path(__file__).with_name("package")
"""Texts of a new package, as patterns of `str.format`."""


def write_package(
    name: str, folder: Path, built_in: Collection[str], terminal: bool = False
) -> list[Path]:
    """Write a package with an environment `name` into a new folder; raises `UserError`.

    With `terminal`, its task is played by the commands of a shell. It must not
    have the name of an environment in `built_in`."""
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
        raise UserError(f"{folder} exists already; give --out the name of a new one")
    words = {"name": name, "module": module, "cls": module.title().replace("_", "")}
    texts = {
        "pyproject.toml": "pyproject.toml",
        f"{module}.py": "terminal_module" if terminal else "module",
        f"test_{module}.py": "terminal_test" if terminal else "test",
        "README.md": "terminal_README.md" if terminal else "README.md",
    }
    try:
        with removed_on_failure(folder):
            folder.mkdir(parents=True)
            for path, template in texts.items():
                text = (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
                (folder / path).write_text(text.format(**words), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror})") from error
    return [folder / path for path in texts]
