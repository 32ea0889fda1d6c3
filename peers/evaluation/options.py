"""What to evaluate: the command's options and a run's TOML file, checked and put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from peers.environments.collection import labels
from peers.environments.registry import load_any
from swarm.errors import UserError
from swarm.jobs.evaluation import TasksDrawn
from swarm.run.toml import describe_run
from swarm.terminal.tables import struct_from_mapping
from swarm.wire.manifest import EnvironmentReference, Sampling

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Evaluation:
    """What is asked of a checkpoint; the same is asked of its base."""

    environments: list[EnvironmentReference]
    split: Split
    tasks: int
    """Tasks of each environment."""
    samples: int
    pass_at: list[int]
    temperature: float
    greedy: bool
    max_new_tokens: int
    """0: the service decides."""
    stop_ids: list[int]
    """Empty: those of the checkpoint."""
    seed: int
    step: int
    """Rollout step for which curricula draw their tasks."""
    with_prompts: bool = False
    """Whether samples have their prompts before they were rendered."""

    @property
    def labels(self) -> list[str]:
        """Each environment's name in tables, different from all others."""
        return labels(self.environments)


@dataclass(frozen=True)
class Given:
    """Options as they were typed; None where an option is missing."""

    tasks: str | None
    run: Path | None
    options: dict[str, Any]
    limit: int
    pass_at: str
    samples: int
    temperature: float | None
    greedy: bool
    max_new_tokens: int | None
    split: Split
    seed: int
    step: int
    """Rollout step for which curricula draw their tasks."""


def wanted_of(given: Given) -> Evaluation:
    """Check the options and complete them from the run's file; raises `UserError`."""
    environments, table = _environments(given)
    sampling = _sampling(given, table)
    stated = given.max_new_tokens is not None or "max_new_tokens" in table
    return Evaluation(
        environments=environments,
        split=given.split,
        tasks=given.limit,
        samples=given.samples,
        pass_at=_pass_at(given),
        temperature=sampling.temperature,
        greedy=given.greedy,
        max_new_tokens=sampling.max_new_tokens if stated else 0,
        stop_ids=sampling.stop_ids if "stop_ids" in table else [],
        seed=given.seed,
        step=given.step,
    )


def as_measured(wanted: Evaluation, drawn: TasksDrawn) -> Evaluation:
    """The evaluation that asks of a base just what was asked of its checkpoint."""
    return replace(wanted, max_new_tokens=drawn.max_new_tokens)


def _environments(given: Given) -> tuple[list[EnvironmentReference], dict[str, Any]]:
    """The environments to evaluate, and the run's table `[sampling]`."""
    if given.run is None:
        if not given.tasks:
            raise UserError("give --tasks NAME[,NAME], or --run FILE.toml to take its environments")
        names = _names(given.tasks)
        if given.options and len(names) > 1:
            raise UserError(
                f"--option is for one environment, and --tasks names {len(names)}; put several "
                "environments with options in a run's TOML file and give it with --run"
            )
        return [_reference(name, given.options) for name in names], {}
    if given.options:
        raise UserError(
            f"--option and --run exclude each other: {given.run} has the options of each "
            "environment"
        )
    described = describe_run(given.run)
    table = described.table.get("sampling", {})
    if not isinstance(table, dict):
        raise UserError(f"{given.run}: sampling must be a table, not {type(table).__name__}")
    found = dict(zip(labels(described.environments), described.environments, strict=True))
    for name in _names(given.tasks) if given.tasks else ():
        if name not in found:
            raise UserError(
                f"--tasks names {name!r}, which {given.run} lacks; there are: {', '.join(found)}"
            )
    chosen = _names(given.tasks) if given.tasks else list(found)
    return [found[name] for name in chosen], table


def _sampling(given: Given, table: dict[str, Any]) -> Sampling:
    """How to sample, by the command's options and else by the run's."""
    wanted = {"stop_ids": [0], **table, "group_size": given.samples}
    if given.temperature is not None:
        wanted["temperature"] = given.temperature
    if given.max_new_tokens is not None:
        wanted["max_new_tokens"] = given.max_new_tokens
    return struct_from_mapping(
        Sampling, wanted, "options" if given.run is None else f"{given.run}: sampling"
    )


def _pass_at(given: Given) -> list[int]:
    """The values of k, ascending."""
    try:
        found = sorted({int(part) for part in given.pass_at.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise UserError(
            f"--pass-at is {given.pass_at!r}; it must be positive integers, like 1 or 1,8"
        )
    if found[-1] > given.samples:
        raise UserError(
            f"--pass-at asks for pass@{found[-1]}, but --samples is {given.samples}; raise it to "
            f"at least {found[-1]}"
        )
    if given.greedy and given.samples > 1:
        raise UserError(
            f"--greedy gives all {given.samples} --samples of a task the same tokens; omit one of "
            "the two"
        )
    return found


def _names(text: str) -> Sequence[str]:
    names = [part.strip() for part in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"--tasks is {text!r}; name each environment once, separated by commas")
    return names


def _reference(name: str, options: dict[str, Any]) -> EnvironmentReference:
    name, _, version = name.partition("@")
    if not version:
        version = load_any(name, options).version
    table = {"name": name, "version": version, "options": options}
    return struct_from_mapping(EnvironmentReference, table, f"--tasks {name}")
