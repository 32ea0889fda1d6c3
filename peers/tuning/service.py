"""Fine-tuning without a network: the loop of `swarm sft`.

Examples are packed like RL's completions. The loss is the mean negative log-probability of the
tokens that the model wrote, stop tokens included; all other tokens are inputs only. A share of the
examples is held back for validation.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from peers.engines.model import count_parameters
from peers.environments import load as load_environment
from peers.learning import states
from peers.learning.batch import Batch
from peers.learning.descent import descend
from peers.learning.examples import draw_tasks, encode_examples, epochs, read_examples
from peers.learning.groups import Group, make_batch
from peers.learning.policy import TrainedPolicy, blank_model
from peers.learning.ranks import Ranks
from peers.learning.settings import LearnerSettings
from swarm.errors import UserError
from swarm.jobs.offline import (
    SaveState,
    StartTuning,
    Tune,
    Tuned,
    TuningService,
    TuningSettings,
    TuningStarted,
    Validate,
    Validated,
)
from swarm.jobs.training import Export
from swarm.rollouts.rollout import Rollout
from swarm.wire.manifest import Objective, Optimiser, Schedule
from swarm.world.progress import report
from swarm.world.tasks import JobThread, in_job_thread


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


class Tuning:
    """Implements `TuningService`."""

    def __init__(self) -> None:
        self._thread = JobThread()

    @in_job_thread
    def start(self, job: StartTuning) -> TuningStarted:
        self._settings = job.settings
        check(self._settings)
        self._job = job
        self._base = Path(job.model)
        self._load()
        left_out = self._split(job)
        self._order = epochs(self._examples, self._settings.seed)
        self._done = 0
        if job.state:
            self._done = self._resume(Path(job.state))
            taken = self._done * self._settings.batch
            next(itertools.islice(self._order, taken - 1, taken), None)
        return TuningStarted(
            examples=len(self._examples),
            held_back=len(self._held_back),
            left_out=left_out,
            parameters=count_parameters(self._policy.model),
            steps_done=self._done,
        )

    def _load(self) -> None:
        """Load the policy that the tuning begins with."""
        settings = self._settings
        numbers = Optimiser(
            learning_rate=settings.learning_rate,
            beta2=0.999,
            weight_decay=0.01,
            warmup_steps=settings.warmup_steps,
            final_learning_rate_share=settings.final_learning_rate_share,
            learning_rate_schedule="cosine",
        )
        schedule = Schedule(steps=settings.steps)
        self._learning = LearnerSettings(Objective(), schedule, optimiser=numbers)
        ranks = Ranks(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        model = blank_model(self._base, self._learning, ranks)
        self._policy = TrainedPolicy(model, self._base, self._learning, ranks)

    def _resume(self, folder: Path) -> int:
        """Take over a state that the same job wrote; return its steps. Raises `UserError`."""
        try:
            facts, shapes = states.read_facts(folder), states.shapes(folder)
            if facts.get("job") == _digest(self._job):
                self._policy.make_optimiser_state(shapes, folder)
                states.read(folder, self._policy.state(), self._policy.ranks)
                return int(facts["steps"])
        except UserError as error:
            raise UserError(
                f"{folder} holds no state that can be read ({error}); remove it to begin anew"
            ) from error
        raise UserError(
            f"{folder} holds an interrupted tuning of another model, data or settings; give the "
            "same, choose another --out, or remove that folder to begin anew"
        )

    def _split(self, job: StartTuning) -> int:
        """Encode examples and hold some back; return how many were left out. Raises `UserError`."""
        settings = self._settings
        limit = min(settings.tokens_max, self._policy.model.config.max_position_embeddings)
        found, left_out, unwanted = read_job(job, limit)
        random.Random(settings.seed).shuffle(found)
        held_back = math.ceil(settings.validation_share * len(found))
        self._held_back = found[: min(held_back, settings.validation_examples_max)]
        self._examples = found[held_back:]
        if not self._examples:
            source = job.data or (job.environment.name if job.environment else "")
            raise UserError(
                f"{source} leaves no example to train on ({len(found)} of at most "
                f"{limit} tokens, {left_out} longer or without a prompt, {unwanted} refused or "
                "outside --reward); give more data"
                + (", or a larger --tokens-max" if left_out else "")
                + (", or a wider --reward" if unwanted else "")
            )
        return left_out

    @in_job_thread
    def step(self, job: Tune) -> Tuned:
        examples = list(itertools.islice(self._order, self._settings.batch))
        batch, policy = as_batch(examples), self._policy
        count = batch.token_count()
        policy.optimiser.zero_grad()
        total = torch.zeros((), device=policy.ranks.device)
        for rows in policy.passes(batch):
            report()
            loss = -policy.scorer(rows, entropy=False)[0].sum() / count
            loss.backward()
            total += loss.detach()
        rate = self._learning.learning_rate(self._done)
        found = descend(policy, {"loss": total}, self._settings.gradient_norm_max, rate)
        self._done += 1
        return Tuned(
            step=self._done,
            loss=found["loss"],
            gradient_norm=found["gradient_norm"],
            learning_rate=rate,
            tokens=count,
            skipped=bool(found["skipped"]),
        )

    @in_job_thread
    def validate(self, job: Validate) -> Validated:
        if not self._held_back:
            return Validated()
        batch = as_batch(self._held_back)
        scores = self._policy.score(self._policy.passes(batch)).cpu()  # fp32 [n]
        episodes = torch.split(scores, batch.completion_lengths.tolist())
        exact = torch.stack([each.sum() for each in episodes]).exp().mean()
        return Validated(loss=-float(scores.mean()), exact=float(exact))

    @in_job_thread
    def save_state(self, job: SaveState) -> None:
        facts = {"steps": self._done, "job": _digest(self._job)}
        states.write(Path(job.folder), self._policy.state(), facts, self._policy.ranks)

    @in_job_thread
    def save(self, job: Export) -> None:
        """Write the policy as a plain Hugging Face folder, durably, in its original dtype."""
        self._policy.write(Path(job.folder), self._policy.snapshot())


def _digest(job: StartTuning) -> str:
    """What a state belongs to."""
    told = msgspec.structs.replace(job, state="")
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()


_SERVICE: type[TuningService] = Tuning


def read_job(job: StartTuning, tokens_max: int) -> tuple[list[Rollout], int, int]:
    """Read and encode the examples of a job; raises `UserError`.

    Also returns how many are too long or have no prompt, and how many answers of policies were
    refused or have a reward out of bounds.
    """
    model, settings = Path(job.model), job.settings
    if job.environment is not None:
        reference = job.environment
        environment = load_environment(reference.name, reference.version, reference.options)
        tasks = draw_tasks(environment, 2 * settings.steps * settings.batch, settings.seed)
        return *encode_examples(tasks, model, tokens_max, environment), 0
    return read_examples(Path(job.data), model, tokens_max, job.reading)


def as_batch(rollouts: Sequence[Rollout]) -> Batch:
    """Make a batch of episodes that shall be learned."""
    groups = [Group([each], [0.0], policy=0) for each in rollouts]
    return make_batch(groups, Objective())
