"""The environment `reasoning-gym`: tasks of the package's data sets, alone or mixed.

The package runs in processes of its own (`peers.environments.graders.reasoning_service`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from peers.environments.graders.pool import ProcessFailed, ServiceError
from peers.environments.graders.reasoning_gym import ReasoningGym as Grader
from peers.environments.graders.reasoning_gym import ReasoningOptions, reasoning_pool
from peers.environments.graders.reasoning_refused import REFUSED
from peers.environments.interface import Grade, SingleTurn, Task, Tasks, Transcript
from peers.environments.tasks import Generated
from swarm.errors import UserError
from swarm.rollouts.seeds import digest, index_by_weight

SEEDS = 1 << 31
"""Seeds of a data set's tasks: some pass them to numpy, which takes 32 bits."""

WHERE = "environment 'reasoning-gym': options"


class ReasoningGymOptions(ReasoningOptions, frozen=True, kw_only=True):
    """Which tasks, and how they are asked."""

    datasets: Annotated[list[str], Meta(min_length=1, max_length=128)] = msgspec.field(
        default_factory=lambda: ["chain_sum"]
    )
    settings: list[str] = msgspec.field(default_factory=list)
    """Settings of data sets: `"chain_sum.max_terms=3"`, values in JSON."""
    instruction: Annotated[str, Meta(pattern=r"\{question\}", max_length=4096)] = "{question}\n"
    """Template of the prompt, with `{question}`."""
    after: Annotated[str, Meta(max_length=1024)] = ""
    """The prompt shows what follows the first such text of the question, or all without it."""


class ReasoningGym(SingleTurn):
    """Rewards finished completions whose answer the data set scores with 1."""

    name = "reasoning-gym"
    version = "1"
    safe_for_strangers = True
    Options = ReasoningGymOptions
    options: ReasoningGymOptions

    def __init__(self, options: ReasoningGymOptions | None = None) -> None:
        """Raises `UserError` for options that contradict each other or name a refused data set."""
        super().__init__(options)
        self._grader = Grader(self.options)
        self.call_seconds = self._grader.call_seconds
        self._settings = _parsed(self.options.settings, self.options.datasets)
        for dataset in self.options.datasets:
            if dataset in REFUSED:
                raise UserError(
                    f"{WHERE}: datasets holds {dataset!r}, which is refused: {REFUSED[dataset]}; "
                    "choose another"
                )

    def tasks(self) -> Tasks:
        """See `SingleTurn.tasks`; raises `UserError` for an unknown data set or setting."""
        for dataset in self.options.datasets:
            request = {"dataset": dataset, "settings": self._settings.get(dataset, {}), "seed": 0}
            try:
                reasoning_pool().ask({"what": "draw", **request})
            except (ProcessFailed, ServiceError) as error:
                raise UserError(
                    f"{WHERE}: data set {dataset!r} cannot draw a task ({error}); correct its name "
                    "or its settings"
                ) from error
        return Generated(self._make)

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """See `SingleTurn.grade`; raises as the grader."""
        return self._grader.grade_episode(task, transcript)

    def _make(self, randomness: bytes) -> Task:
        datasets = self.options.datasets
        mixture = digest("swarm/1/mixture", randomness)
        dataset = datasets[index_by_weight(mixture, [1.0] * len(datasets))]
        data = {
            "dataset": dataset,
            "settings": self._settings.get(dataset, {}),
            "seed": int.from_bytes(randomness, "big") % SEEDS,
        }
        drawn = reasoning_pool().ask({"what": "draw", **data})
        question = drawn["question"]
        if self.options.after and self.options.after in question:
            question = question.partition(self.options.after)[2]
        prompt = self.options.instruction.replace("{question}", question)
        return Task(prompt, drawn["answer"], data)


def _parsed(settings: list[str], datasets: list[str]) -> dict[str, dict[str, Any]]:
    """Settings by data set; raises `UserError`."""
    parsed: dict[str, dict[str, Any]] = {}
    for setting in settings:
        where, equals, value = setting.partition("=")
        dataset, dot, name = where.strip().partition(".")
        try:
            if not (equals and dot and name):
                raise ValueError("it must be DATASET.SETTING=VALUE")
            if dataset not in datasets:
                raise ValueError(f"{dataset} is not among the datasets")
            parsed.setdefault(dataset, {})[name] = msgspec.json.decode(value.encode())
        except (ValueError, msgspec.DecodeError) as error:
            raise UserError(
                f"{WHERE}: settings holds {setting!r:.100} ({error}); write for instance "
                "'chain_sum.max_terms=3', values in JSON"
            ) from error
    return parsed
