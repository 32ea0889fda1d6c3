"""Checks 2 to 5 of a submission (design §7), in a child process without torch.

Everything here is exact: whoever has the file, the step order and the manifest finds the same
fault. The hostile file itself is opened in a process of its own (`peers.validator.parsing`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import blake3
import numpy as np

from peers.environments import Environment, Renderer, Task, grade, task_of_step
from peers.environments import load as load_environment
from peers.validator.checks.base import Report
from peers.validator.checks.file import CHECKS, Inspection
from peers.validator.parsing import Reader
from swarm.errors import UserError
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.seeds import submission_seed, task_seed
from swarm.rollouts.submission_file import ReadLimits


class InspectorService:
    """Judges what needs no policy. Methods are called by the network process."""

    def __init__(self, environment: str = "", environment_version: str = "") -> None:
        """Raises `UserError` for an environment (unless "") that is not here."""
        self._renderer: Renderer | None = None
        self._environments: dict[tuple[str, str], Environment] = {}
        if environment:
            self._environment(environment, environment_version)
        self._reader = Reader()

    def inspect(
        self,
        path: str,
        digest: bytes,
        out_path: str,
        run: str,
        lineage: int,
        step: int,
        policy: int,
        worker: str,
        number: int,
        nonce: bytes,
        groups: int,
        group_size: int,
        environment: str,
        environment_version: str,
        tokenizer_folder: str,
        temperature: float,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        bytes_max: int,
    ) -> dict[str, Any]:
        """Judge the file at `path`, whose BLAKE3-256 is `digest`, and write its rollouts in
        canonical form to `out_path`.

        Gives `checks` [[name, figure, threshold, passed], …] up to the first that fails, and its
        name as `failed` (empty: none), `detail`, `proven_fault`, `rewards` [groups][G],
        `task_means` and `task_spreads` [groups] (empty: no length penalty), `group_digests`
        (BLAKE3 of each group's prompt and completions), `canonical_digest` (of what was written)
        and `tokens` (completion tokens). An environment that is not here or draws no task fails
        the check "environment"; one that cannot grade leaves `rewards` empty, says why as
        `ungraded`, and the tokens tell whose fault that is. Raises `UserError` when the tokenizer
        is missing here, `OSError` when the file is, or is another one.
        """
        seed = submission_seed(run, nonce, worker, number)
        try:
            grader = self._environment(environment, environment_version)
            tasks = [task_of_step(grader, task_seed(seed, group), step) for group in range(groups)]
        except UserError as error:
            return _stopped(Report(failed="environment", detail=str(error)))
        renderer = self._renderer_in(Path(tokenizer_folder))
        vocabulary = _vocabulary_size(Path(tokenizer_folder))
        prompts = [renderer.encode_prompt(task.prompt) for task in tasks]
        limits = ReadLimits(
            bytes_max=bytes_max,
            rows_max=groups * group_size,
            # One more than right, so that a longer prompt is found to be a wrong prompt.
            prompt_tokens_max=max(map(len, prompts)) + 1,
            completion_tokens_max=max_new_tokens + 1,
        )
        inspection = Inspection(
            read=lambda: self._reader.read(Path(path), digest, Path(out_path), limits),
            header={
                "run": run,
                "lineage": lineage,
                "step": step,
                "policy": policy,
                "worker": worker,
                "number": number,
                "environment": environment,
                "environment_version": environment_version,
                "temperature": temperature,
                "max_new_tokens": max_new_tokens,
                "stop_ids": list(stop_ids),
            },
            tasks=tasks,
            prompts=prompts,
            group_size=group_size,
            vocabulary=vocabulary,
            stop_ids=stop_ids,
            max_new_tokens=max_new_tokens,
        )
        report = Report().run(CHECKS, inspection)
        if report.failed:
            return _stopped(report)
        rollouts = inspection.rollouts
        ungraded = ""
        try:
            graded = _rewards(rollouts, grader, renderer, tasks, group_size, stop_ids)
        except UserError as error:
            graded, ungraded = [], str(error)
        penalised = bool(graded) and any(task.length_weight for task in tasks)
        return {
            **asdict(report),
            "ungraded": ungraded,
            "rewards": _less_penalties(rollouts, tasks, graded) if graded else [],
            "task_means": [sum(group) / len(group) for group in graded] if penalised else [],
            "task_spreads": [max(group) - min(group) for group in graded] if penalised else [],
            "group_digests": _group_digests(rollouts, group_size),
            "canonical_digest": inspection.contents.canonical_digest,
            "tokens": len(rollouts.completion_tokens),
        }

    def close(self) -> None:
        """End the process that reads files; the end of this process does so too."""
        self._reader.close()

    def _environment(self, name: str, version: str) -> Environment:
        found = self._environments.get((name, version))
        if found is None:
            found = self._environments[name, version] = load_environment(name, version)
        return found

    def _renderer_in(self, folder: Path) -> Renderer:
        """The folder's tokenizer. Every policy has the same, and a large one takes a second."""
        try:
            current = blake3.blake3((folder / "tokenizer.json").read_bytes()).digest()
        except OSError:
            current = b""  # Renderer says what is wrong
        if self._renderer is None or self._renderer.tokenizer_hash != current:
            self._renderer = Renderer(folder)
        return self._renderer


def _stopped(report: Report) -> dict[str, Any]:
    """What `inspect` gives when a check has failed."""
    return {
        **asdict(report),
        "ungraded": "",
        "rewards": [],
        "task_means": [],
        "task_spreads": [],
        "group_digests": [],
        "canonical_digest": b"",
        "tokens": 0,
    }


def _vocabulary_size(folder: Path) -> int:
    """Of the model, which may be larger than the tokenizer's."""
    try:
        return int(json.loads((folder / "config.json").read_bytes())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} has no config.json that gives vocab_size ({error})") from error


def _rewards(
    rollouts: Rollouts,
    grader: Environment,
    renderer: Renderer,
    tasks: list[Task],
    group_size: int,
    stop_ids: Sequence[int],
) -> list[list[float]]:
    """[groups][G], from the very tokens that go on to proof and training; raises `UserError`."""
    stops = set(stop_ids)
    rewards = []
    for group, task in enumerate(tasks):
        graded = []
        for row in range(group * group_size, (group + 1) * group_size):
            text, finished = renderer.decode_completion(rollouts.completion(row), list(stops))
            graded.append(grade(grader, task, [text], finished))
        rewards.append(graded)
    return rewards


def _less_penalties(
    rollouts: Rollouts, tasks: list[Task], graded: list[list[float]]
) -> list[list[float]]:
    """Rewards [groups][G] less what each completion's length costs."""
    lengths = iter(np.diff(rollouts.completion_offsets).tolist())
    return [
        [reward - task.length_penalty(next(lengths)) for reward in group]
        for task, group in zip(tasks, graded, strict=True)
    ]


def _group_digests(rollouts: Rollouts, group_size: int) -> list[bytes]:
    """BLAKE3 of each group's prompt and completions, each behind its length."""
    digests = []
    for first in range(0, len(rollouts), group_size):
        hasher = blake3.blake3()
        parts = [rollouts.prompt(first)]
        parts += [rollouts.completion(row) for row in range(first, first + group_size)]
        for part in parts:
            hasher.update(np.array([len(part), *part], "<i4").tobytes())
        digests.append(hasher.digest())
    return digests
