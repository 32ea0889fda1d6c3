"""What the trainer's child process does when it is called: learn, save, publish, evaluate."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from peers.demo import ENVIRONMENT, SAMPLING
from peers.environments import load as load_environment
from peers.environments.collection import Environments, labels
from peers.policy.demo import make_policy
from peers.policy.native import NativeEngine
from peers.trainer import metrics
from peers.trainer.evaluation import mean_reward
from peers.trainer.learning.batch import Group, informative
from peers.trainer.learning.learner import Learner
from peers.trainer.learning.packing import why_not
from peers.trainer.learning.ranks import Ranks, lead
from peers.trainer.learning.settings import LearnerSettings
from peers.trainer.learning.sharding import Sharding
from peers.trainer.warmup import warm_up
from swarm.errors import UserError
from swarm.messages import EnvironmentReference, Objective, Optimiser, Sampling, Schedule
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import BadSubmission, ReadLimits, read

PROMPT_TOKENS_MAX = 1 << 20
EVALUATION_PROMPTS = 512


def open_service() -> Any:
    """What the trainer's child is: a `TrainerService`; under `torchrun`, all ranks' behind it."""
    return lead(TrainerService)


class TrainerService:
    """Holds the learner. All paths are absolute folders and files that every rank sees."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
        self._learner: Learner | None = None
        self._metrics = metrics.Metrics()
        self._peak_flops = 0.0

    def start(
        self,
        model: str,
        objective: Mapping[str, Any],
        optimiser: Mapping[str, Any],
        schedule: Mapping[str, Any],
        sampling: Mapping[str, Any],
        environments: Sequence[EnvironmentReference],
        seed: int,
        sharding: Mapping[str, Any] | None = None,
        attention: str = "fastest",
    ) -> dict[str, Any]:
        """Begin a run with the HF folder `model` as policy 0. Raises `UserError`."""
        self._sampling = Sampling(**sampling)
        self._schedule = Schedule(**schedule)
        self._references = msgspec.convert(environments, list[EnvironmentReference])
        self._environments = Environments(self._references)
        self._base = Path(model)
        settings = LearnerSettings(
            objective=Objective(**objective),
            optimiser=Optimiser(**optimiser),
            schedule=self._schedule,
            seed=seed,
            completion_tokens_max=self._sampling.max_new_tokens,
            sharding=Sharding(**(sharding or {})),
            attention=None if attention == "fastest" else attention,
        )
        reason = (
            ""
            if settings.attention is None
            else why_not(settings.attention, self._ranks.device, settings.sharding.mixed_precision)
        )
        if reason:
            raise UserError(f"trainer.attention: {reason}; leave it out for the fastest there is")
        self._learner = Learner(self._base, settings, ranks=self._ranks)
        return {"step": 0}

    def resume(self, folder: str, policies: Mapping[str, str], **run: Any) -> dict[str, Any]:
        """Go on from what `save` wrote; `policies` are published folders by step.

        Other arguments as for `start`. Gives the `step` reached and the submissions `consumed`
        (those young enough to be offered again).
        """
        self.start(**run)
        learner = self._held()
        learner.load(Path(folder), {int(step): Path(path) for step, path in policies.items()})
        return {
            "step": learner.step,
            "consumed": [name for names in learner.consumed.values() for name in names],
        }

    def follow(
        self,
        objective: Mapping[str, Any],
        optimiser: Mapping[str, Any],
        schedule: Mapping[str, Any],
        sampling: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Learn by another version of the run from the next step on."""
        self._sampling = Sampling(**sampling)
        self._schedule = Schedule(**schedule)
        learner = self._held()
        learner.follow(
            dataclasses.replace(
                learner.settings,
                objective=Objective(**objective),
                optimiser=Optimiser(**optimiser),
                schedule=self._schedule,
                completion_tokens_max=self._sampling.max_new_tokens,
            )
        )
        return {}

    def roll_back(self, folder: str, policies: Mapping[str, str], lineage: int) -> dict[str, Any]:
        """Go on from an older state as a new lineage, which inherits what was consumed."""
        learner = self._held()
        consumed = learner.consumed
        learner.load(Path(folder), {int(step): Path(path) for step, path in policies.items()})
        learner.begin_lineage(lineage, consumed)
        return {"step": learner.step}

    def record_to(
        self, tensorboard: str, wandb: str, run: str, config: Mapping[str, Any], peak_flops: float
    ) -> dict[str, Any]:
        """Say where `record` writes, and hear how many `ranks` there are; raises `UserError`."""
        self._peak_flops = peak_flops or metrics.peak_flops(self._ranks.device)
        if self._ranks.rank == 0:
            self._metrics = metrics.Metrics(tensorboard, wandb, run, config)
        return {"ranks": self._ranks.world}

    def record(self, step: int, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Write one step's figures."""
        self._metrics.record(step, figures)
        return {}

    def train(self, step: int, submissions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Take one rollout step.

        Each submission is `{digest (hex), path, policy, rewards [groups][G], kept [groups]}`; the
        rewards are the validator's, and what is not `kept` is left out (all are, unless given).
        `sampling` is what it was generated with, where that is not this step's.
        Gives the learner's metrics, and `outcomes`: for each submission, for each group,
        "consumed" or "zero-advantage". Where some cannot be read, nothing is trained on, and all
        it gives is `unreadable`: [[index, reason], …].
        """
        learner = self._held()
        started = time.perf_counter()
        read = [self._groups(submission) for submission in submissions]
        # What one rank cannot read, none of them trains on.
        failed = self._ranks.max([float(isinstance(found, str)) for found in read])
        if any(failed):
            return {
                "unreadable": [
                    [index, found if isinstance(found, str) else "another rank cannot read it"]
                    for index, (found, bad) in enumerate(zip(read, failed, strict=True))
                    if bad
                ]
            }
        by_submission = [found for found in read if not isinstance(found, str)]
        groups = [group for some in by_submission for group in some]
        found = learner.train_step(
            groups, step, [str(submission["digest"]) for submission in submissions]
        )
        used = {id(group) for group in informative(groups)}
        return {
            **found,
            **metrics.speed(
                learner.model,
                groups,
                time.perf_counter() - started,
                self._peak_flops * self._ranks.world,
            ),
            "outcomes": [
                ["consumed" if id(group) in used else "zero-advantage" for group in some]
                for some in by_submission
            ],
        }

    def begin_save(self, folder: str) -> dict[str, Any]:
        """Copy all that an exact resume needs and begin to write it."""
        self._held().begin_save(Path(folder))
        return {}

    def finish_save(self) -> dict[str, Any]:
        """Wait until what `begin_save` began is durable."""
        self._held().finish_save()
        return {}

    def export(self, folder: str) -> dict[str, Any]:
        """Write the policy as a plain HF folder, durably."""
        self._held().export(Path(folder))
        return {}

    def evaluate(self, folder: str, prompts: int, split: str) -> dict[str, Any]:
        """`sampled` and `greedy` accuracy of a published policy on `prompts` tasks of a split, of
        each of the `environments` that has a weight, and their mean by these weights."""
        if self._ranks.rank != 0:
            return {}
        found: dict[str, dict[str, float]] = {}
        shares: dict[str, float] = {}
        total = sum(reference.weight for reference in self._references)
        for label, reference in zip(labels(self._references), self._references, strict=True):
            if reference.weight:
                shares[label] = reference.weight / total
                environment = self._environments.of(reference)
                found[label] = _accuracies(
                    Path(folder), environment, self._sampling, prompts, split
                )
        means = {
            kind: sum(share * found[label][kind] for label, share in shares.items())
            for kind in ("sampled", "greedy")
        }
        return {**means, "environments": found}

    def end(self) -> dict[str, Any]:
        """The run is over; other ranks, if there are any, end now."""
        return {}

    def prepare_base(self, folder: str, seed: int) -> dict[str, Any]:
        """Make the demo's base policy in `folder`: random weights, a short SFT; and evaluate it.

        Gives `sft_steps`, and `sampled` and `greedy` accuracy on 512 held-out prompts.
        """
        if self._ranks.rank != 0:
            return {}
        environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
        make_policy(Path(folder), seed)
        steps = warm_up(Path(folder), environment, seed)
        return {
            "sft_steps": steps,
            **_accuracies(Path(folder), environment, SAMPLING, EVALUATION_PROMPTS, "held_out"),
        }

    def _held(self) -> Learner:
        if self._learner is None:
            raise ValueError("call start or resume first")
        return self._learner

    def _groups(self, submission: Mapping[str, Any]) -> list[Group] | str:
        """The groups of an accepted file, or why they cannot be trained on: a validator has checked
        it whole, but this is another machine, and its disk another disk."""
        rewards: list[list[float]] = submission["rewards"]
        policy = int(submission["policy"])
        kept = submission.get("kept", [True] * len(rewards))
        sampling = (
            Sampling(**submission["sampling"]) if "sampling" in submission else self._sampling
        )
        path = Path(submission["path"])
        if policy not in self._held().policies:
            return f"its policy {policy} is not held here; there are: {self._held().policies}"
        try:
            limits = ReadLimits(
                bytes_max=path.stat().st_size,
                rows_max=sum(map(len, rewards)),
                prompt_tokens_max=PROMPT_TOKENS_MAX,
                completion_tokens_max=sampling.max_new_tokens,
            )
            found = read(path, limits, bytes.fromhex(submission["digest"])).rollouts
            return list(_cut(found, rewards, policy, kept, sampling.temperature))
        except BadSubmission as error:
            return error.detail
        except (OSError, ValueError) as error:
            return str(error)


def _cut(
    rollouts: Rollouts,
    rewards: Sequence[Sequence[float]],
    policy: int,
    kept: Sequence[bool],
    temperature: float,
) -> list[Group]:
    """Rows group by group; raises `ValueError` unless the rewards are of exactly these rows."""
    if len(rollouts) != sum(map(len, rewards)):
        raise ValueError(f"{sum(map(len, rewards))} rewards for {len(rollouts)} completions")
    groups = []
    row = 0
    for group_rewards, keep in zip(rewards, kept, strict=True):
        rows = range(row, row + len(group_rewards))
        groups.append(
            Group(
                prompt=rollouts.prompt(row),
                completions=[rollouts.completion(each) for each in rows],
                rewards=group_rewards,
                policy=policy,
                log_probabilities=[rollouts.row_log_probabilities(each) for each in rows],
                kept=keep,
                temperature=temperature,
            )
        )
        row = rows.stop
    return groups


@torch.inference_mode()
def _accuracies(
    folder: Path, environment: Any, sampling: Sampling, prompts: int, split: Any
) -> dict[str, float]:
    engine = NativeEngine(folder)
    return {
        name: mean_reward(
            engine, environment, folder, sampling, prompts=prompts, split=split, greedy=greedy
        )
        for name, greedy in (("sampled", False), ("greedy", True))
    }
