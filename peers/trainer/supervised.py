"""Supervised fine-tuning: the trainer's other mode, for a policy's warm-up before RL.

Examples are prompts with their answers, from a file, or whole episodes of an environment. They are
packed like RL's completions. The loss is the mean negative log-probability of the model's tokens,
stop tokens included. A share of the examples is held back for validation.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from peers.engines import model as policy_model
from peers.engines.architecture import describe
from peers.environments import Environment, Task
from peers.environments import load as load_environment
from peers.trainer.examples import draw_tasks, encode_examples, epochs, read_tasks
from peers.trainer.learning.batch import Batch
from peers.trainer.learning.durable import whole_folder
from peers.trainer.learning.groups import Group, make_batch
from peers.trainer.learning.masks import fastest_attention
from peers.trainer.learning.packing import lay_out, lay_out_flat
from peers.trainer.learning.ranks import Ranks
from peers.trainer.learning.scorer import Scorer
from peers.trainer.learning.settings import learning_rate
from peers.trainer.learning.sharding import shard
from swarm.errors import UserError
from swarm.jobs.offline import (
    StartTuning,
    Tune,
    Tuned,
    TuningService,
    TuningSettings,
    TuningStarted,
    Validate,
    Validated,
)
from swarm.jobs.training import Done, Export, Sharding
from swarm.manifest import Objective, Optimiser
from swarm.rollouts.rollout import Rollout
from swarm.world.job_thread import JobThread, in_job_thread
from swarm.world.progress import report


def check(settings: TuningSettings) -> None:
    """Check the settings' bounds; raises `UserError`."""
    for name, fine, bounds in (
        ("steps", settings.steps >= 1, "at least 1"),
        ("batch", settings.batch >= 1, "at least 1"),
        ("learning_rate", 0 < settings.learning_rate < 1, "above 0 and below 1"),
        ("warmup_steps", settings.warmup_steps >= 0, "at least 0"),
        ("validation_share", 0 <= settings.validation_share < 1, "from 0 to below 1"),
        ("tokens_max", settings.tokens_max >= 2, "at least 2"),
    ):
        if not fine:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {getattr(settings, name)}; it must be {bounds}")


class SftService:
    """Implements `TuningService`."""

    def __init__(self) -> None:
        self._thread = JobThread()

    @in_job_thread
    def start(self, job: StartTuning) -> TuningStarted:
        self._settings = job.settings
        check(self._settings)
        self._base = Path(job.model)
        loaded = policy_model.load(self._base)
        self._dtype: torch.dtype = loaded.dtype
        ranks = Ranks(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self._device = ranks.device
        self._model: Any = loaded.train()
        capped = describe(loaded.config.to_dict()).attention_cap is not None
        self._model.set_attn_implementation(fastest_attention(self._device, capped=capped))
        self._scorer = Scorer(self._model)
        shard(self._scorer, self._model.model.layers, ranks, Sharding())
        self._optimiser = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._rates = Optimiser(
            learning_rate=self._settings.learning_rate,
            warmup_steps=self._settings.warmup_steps,
            final_learning_rate_share=self._settings.final_learning_rate_share,
            learning_rate_schedule="cosine",
        )
        if job.environment is None:
            environment, source, tasks = None, job.data, read_tasks(Path(job.data))
        else:
            environment = load_environment(
                job.environment.name, job.environment.version, job.environment.options
            )
            count = 2 * self._settings.steps * self._settings.batch
            source = job.environment.name
            tasks = draw_tasks(environment, count, self._settings.seed)
        left_out = self._split(tasks, source, environment)
        self._order = epochs(self._examples, self._settings.seed)
        self._done = 0
        return TuningStarted(
            examples=len(self._examples),
            held_back=len(self._held_back),
            left_out=left_out,
            parameters=policy_model.count_parameters(self._model),
        )

    def _split(self, tasks: Iterator[Task], source: str, environment: Environment | None) -> int:
        """Encode examples and hold some back; return how many were left out. Raises `UserError`."""
        limit = min(self._settings.tokens_max, self._model.config.max_position_embeddings)
        found, left_out = encode_examples(tasks, self._base, limit, environment)
        random.Random(self._settings.seed).shuffle(found)
        held_back = math.ceil(self._settings.validation_share * len(found))
        self._held_back = found[: min(held_back, self._settings.validation_examples_max)]
        self._examples = found[held_back:]
        if not self._examples:
            raise UserError(
                f"{source} leaves no example to train on ({len(found)} of at most "
                f"{limit} tokens, {left_out} longer or without a prompt)"
            )
        return left_out

    @in_job_thread
    def step(self, job: Tune) -> Tuned:
        batch = as_batch(list(itertools.islice(self._order, self._settings.batch)))
        tokens = batch.token_count()
        self._optimiser.zero_grad()
        total = 0.0
        for rows in self._passes(batch):
            loss = -self._scorer(rows.to(self._device), entropy=False)[0].sum() / tokens
            loss.backward()
            report()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), self._settings.gradient_norm_max
        )
        rate = learning_rate(self._rates, self._settings.steps, self._done)
        finite = bool(torch.isfinite(norm)) and math.isfinite(total)
        if finite:
            self._optimiser.param_groups[0]["lr"] = rate
            self._optimiser.step()
        self._done += 1
        return Tuned(
            step=self._done,
            loss=total,
            gradient_norm=float(norm),
            learning_rate=rate,
            tokens=tokens,
            skipped=not finite,
        )

    @in_job_thread
    @torch.no_grad()
    def validate(self, job: Validate) -> Validated:
        if not self._held_back:
            return Validated()
        self._model.eval()
        batch = as_batch(self._held_back)
        surprise = torch.zeros(batch.token_count(), device=self._device)
        for rows in self._passes(batch):
            report()
            moved = rows.to(self._device)
            surprise[moved.index] = -self._scorer(moved, entropy=False)[0]
        self._model.train()
        answers = torch.split(surprise.cpu(), batch.completion_lengths.tolist())
        exact = torch.stack([answer.sum() for answer in answers]).neg().exp().mean()
        return Validated(loss=float(surprise.mean()), exact=float(exact))

    @in_job_thread
    def save(self, job: Export) -> Done:
        """Write the policy as a plain Hugging Face folder, durably, in its original dtype."""
        weights = {
            name: value.detach().to(self._dtype).cpu()
            for name, value in self._model.named_parameters()
        }
        with whole_folder(Path(job.folder)) as aside:
            policy_model.save_share(
                weights, aside, self._model.config, self._base, 0, dict.fromkeys(weights, 0)
            )
        return Done()

    def _passes(self, batch: Batch) -> Any:
        return lay_out_flat(batch) if self._device.type == "cuda" else lay_out(batch)


_SERVICE: type[TuningService] = SftService


def as_batch(examples: Sequence[Rollout]) -> Batch:
    """Make a batch of episodes that shall be learned."""
    groups = [Group([each], [0.0], policy=0) for each in examples]
    return make_batch(groups, Objective())
