"""Fine-tuning without a network: the loop of `swarm sft` and `swarm dpo`.

Examples are packed like RL's completions. The loss (`peers.tuning.service`) weighs the
log-probability of each token that the model wrote; all other tokens are inputs only. A share of
the examples is held back for validation.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from peers.engines import model as policy_model
from peers.engines.architecture import describe
from peers.environments import load as load_environment
from peers.learning.batch import Batch
from peers.learning.durable import whole_folder
from peers.learning.examples import Encoder, draw_tasks, epochs
from peers.learning.groups import Group, make_batch
from peers.learning.masks import fastest_attention
from peers.learning.packing import lay_out, lay_out_flat
from peers.learning.ranks import Ranks
from peers.learning.records import Records
from peers.learning.scorer import Scorer
from peers.learning.settings import learning_rate
from peers.learning.sharding import shard
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
from swarm.jobs.training import Export, Sharding
from swarm.rollouts.rollout import Rollout
from swarm.wire.manifest import Objective, Optimiser
from swarm.world.progress import report
from swarm.world.tasks import JobThread, in_job_thread

TENSORS, PROGRESS = "state.safetensors", "state.json"


def write_state(
    folder: Path, job: StartTuning, model: Any, optimiser: torch.optim.Optimizer, steps: int
) -> None:
    """Write all that the next step depends on, besides the job."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach().cpu().contiguous()
        for key, value in optimiser.state[parameter].items():
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    safetensors.torch.save_file(tensors, folder / TENSORS)
    told = {"steps": steps, "job": _digest(job)}
    (folder / PROGRESS).write_text(json.dumps(told), encoding="utf-8")


def read_state(folder: Path, job: StartTuning, model: Any, optimiser: torch.optim.Optimizer) -> int:
    """Take over a state that the same job wrote; return its steps. Raises `UserError`."""
    try:
        told = json.loads((folder / PROGRESS).read_bytes())
        if told["job"] != _digest(job):
            raise UserError(
                f"{folder} holds an interrupted tuning of another model, data or settings; give "
                "the same, choose another --out, or remove that folder to begin anew"
            )
        with safetensors.safe_open(folder / TENSORS, framework="pt") as file:
            names = set(file.keys())
            for name, parameter in model.named_parameters():
                with torch.no_grad():
                    parameter.copy_(file.get_tensor(f"weight/{name}"))
                moments = {
                    key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in names
                }
                optimiser.state[parameter] = {
                    key: file.get_tensor(f"{key}/{name}").to(parameter.device) for key in moments
                }
        return int(told["steps"])
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{folder} holds no state that can be read ({error}); remove it to begin anew"
        ) from error


def _digest(job: StartTuning) -> str:
    """What a state belongs to."""
    told = msgspec.structs.replace(job, state="")
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()


# The losses of fine-tuning: how each token's log-probability is weighed.
#
# The gradient of each loss is that of −Σ weight · log π over the tokens that the model wrote, with
# weights that are constants. A batch may therefore take any number of forward passes.


@dataclass(eq=False)
class Example:
    """Episodes that are learned together: one, or a chosen one and a rejected one."""

    rollouts: Sequence[Rollout]
    reference: float = 0.0
    """Of a pair: log-probability of the chosen answer less that of the rejected one, in the policy
    that the tuning began with."""


Score = Callable[[Sequence[Example]], Tensor]
"""Log-probabilities of some examples' tokens, fp32 [n], without a gradient."""


class Loss(Protocol):
    """What is learned of examples."""

    def weigh(
        self, examples: Sequence[Example], batch: Batch, score: Score
    ) -> tuple[Tensor, float | None]:
        """Each token's weight, fp32 [n], and the loss; None: it is −Σ weight · log π itself."""
        ...

    def judge(self, examples: Sequence[Example], batch: Batch, score: Score) -> Validated:
        """Measure the policy on examples held back."""
        ...


class Answers:
    """Mean negative log-probability of the model's tokens, stop tokens included."""

    def weigh(
        self, examples: Sequence[Example], batch: Batch, score: Score
    ) -> tuple[Tensor, float | None]:
        count = batch.token_count()
        return torch.full((count,), 1 / count), None

    def judge(self, examples: Sequence[Example], batch: Batch, score: Score) -> Validated:
        scores = score(examples)
        exact = _per_episode(scores, batch).exp().mean()
        return Validated(loss=-float(scores.mean()), exact=float(exact))


class Preferences:
    """DPO (Rafailov et al. 2023, 2305.18290): −log σ(β · margin), mean over the pairs.

    The margin is how much more log-probability the chosen answer gained over the reference than
    the rejected one. `answer_weight` adds the mean negative log-probability of the chosen answers,
    which keeps them from becoming less likely together with the rejected ones (Pang et al. 2024,
    2404.19733).
    """

    def __init__(self, beta: float, answer_weight: float) -> None:
        self._beta, self._answer_weight = beta, answer_weight

    def refer(self, examples: Sequence[Example], batch: int, score: Score) -> None:
        """Compute the reference of all pairs, once, `batch` pairs at a time."""
        for start in range(0, len(examples), batch):
            some = examples[start : start + batch]
            lengths = torch.tensor([len(r.model_tokens) for each in some for r in each.rollouts])
            sums = _sums(score(some), lengths)
            for example, difference in zip(some, (sums[0::2] - sums[1::2]).tolist(), strict=True):
                example.reference = difference

    def weigh(
        self, examples: Sequence[Example], batch: Batch, score: Score
    ) -> tuple[Tensor, float | None]:
        scores = score(examples)
        margin = self._margins(scores, examples, batch)
        pull = self._beta * torch.sigmoid(-self._beta * margin) / len(examples)
        signed = torch.stack([pull, -pull], dim=1).flatten()
        weights = batch.per_token(signed)
        chosen = batch.per_token(torch.tensor([1.0, 0.0]).repeat(len(examples)))
        share = chosen * self._answer_weight / chosen.sum()
        value = -logsigmoid(self._beta * margin).mean() - (share * scores).sum()
        return weights + share, float(value)

    def judge(self, examples: Sequence[Example], batch: Batch, score: Score) -> Validated:
        margin = self._margins(score(examples), examples, batch)
        return Validated(
            loss=-float(logsigmoid(self._beta * margin).mean()),
            preferred=float((margin > 0).float().mean()),
            margin=float(margin.mean()),
        )

    def _margins(self, scores: Tensor, examples: Sequence[Example], batch: Batch) -> Tensor:
        sums = _per_episode(scores, batch)
        return sums[0::2] - sums[1::2] - torch.tensor([each.reference for each in examples])


def _per_episode(scores: Tensor, batch: Batch) -> Tensor:
    return _sums(scores, batch.completion_lengths)


def _sums(scores: Tensor, lengths: Tensor) -> Tensor:
    """The sum of each episode's scores [n], by their numbers of tokens."""
    return torch.stack([each.sum() for each in torch.split(scores, lengths.tolist())])


def check(settings: TuningSettings) -> None:
    """Check the settings' bounds; raises `UserError`."""
    for name, fine, bounds in (
        ("steps", settings.steps >= 1, "at least 1"),
        ("batch", settings.batch >= 1, "at least 1"),
        ("learning_rate", 0 < settings.learning_rate < 1, "above 0 and below 1"),
        ("warmup_steps", settings.warmup_steps >= 0, "at least 0"),
        ("validation_share", 0 <= settings.validation_share < 1, "from 0 to below 1"),
        ("tokens_max", settings.tokens_max >= 2, "at least 2"),
        ("beta", 0 < settings.beta <= 100, "above 0, and at most 100"),
        ("answer_weight", 0 <= settings.answer_weight <= 100, "from 0 to 100"),
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
        self._loss: Loss = Answers()
        if self._pairs:
            self._loss = Preferences(self._settings.beta, self._settings.answer_weight)
            self._loss.refer(self._examples + self._held_back, self._settings.batch, self._score)
        self._order = epochs(self._examples, self._settings.seed)
        self._done = 0
        if job.state:
            self._done = read_state(Path(job.state), job, self._model, self._optimiser)
            taken = self._done * self._settings.batch
            next(itertools.islice(self._order, taken - 1, taken), None)
        return TuningStarted(
            examples=len(self._examples),
            held_back=len(self._held_back),
            left_out=left_out,
            parameters=policy_model.count_parameters(self._model),
            steps_done=self._done,
        )

    @property
    def _pairs(self) -> bool:
        """Whether an example is a pair of a chosen and a rejected answer."""
        return self._settings.loss == "preferences"

    def _load(self) -> None:
        """Load the policy that the tuning begins with."""
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

    def _split(self, job: StartTuning) -> int:
        """Encode examples and hold some back; return how many were left out. Raises `UserError`."""
        settings = self._settings
        limit = min(settings.tokens_max, self._model.config.max_position_embeddings)
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
                + ("; a pair needs answers of unequal reward to a prompt" if self._pairs else "")
            )
        return left_out

    @in_job_thread
    def step(self, job: Tune) -> Tuned:
        examples = list(itertools.islice(self._order, self._settings.batch))
        batch = batch_of(examples)
        weights, value = self._loss.weigh(examples, batch, self._score)
        weights = weights.to(self._device)
        self._optimiser.zero_grad()
        total = 0.0
        for rows in self._passes(batch):
            moved = rows.to(self._device)
            loss = -(self._scorer(moved, entropy=False)[0] * weights[moved.index]).sum()
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
            loss=total if value is None else value,
            gradient_norm=float(norm),
            learning_rate=rate,
            tokens=batch.token_count(),
            skipped=not finite,
        )

    @torch.no_grad()
    def _score(self, examples: Sequence[Example]) -> Tensor:
        """Log-probabilities of the tokens that the model wrote, fp32 [n], on the CPU."""
        self._model.eval()
        batch = batch_of(examples)
        found = torch.zeros(batch.token_count(), device=self._device)
        for rows in self._passes(batch):
            report()
            moved = rows.to(self._device)
            found[moved.index] = self._scorer(moved, entropy=False)[0]
        self._model.train()
        return found.cpu()

    @in_job_thread
    def validate(self, job: Validate) -> Validated:
        if not self._held_back:
            return Validated()
        return self._loss.judge(self._held_back, batch_of(self._held_back), self._score)

    @in_job_thread
    def save_state(self, job: SaveState) -> None:
        with whole_folder(Path(job.folder)) as aside:
            write_state(aside, self._job, self._model, self._optimiser, self._done)

    @in_job_thread
    def save(self, job: Export) -> None:
        """Write the policy as a plain Hugging Face folder, durably, in its original dtype."""
        weights = {
            name: value.detach().to(self._dtype).cpu()
            for name, value in self._model.named_parameters()
        }
        with whole_folder(Path(job.folder)) as aside:
            policy_model.save_share(
                weights, aside, self._model.config, self._base, 0, dict.fromkeys(weights, 0)
            )

    def _passes(self, batch: Batch) -> Any:
        return lay_out_flat(batch) if self._device.type == "cuda" else lay_out(batch)


_SERVICE: type[TuningService] = Tuning


class ReadExamples(NamedTuple):
    """The examples of a job."""

    examples: list[Example]
    left_out: int
    """Examples that are too long or have no prompt."""
    unwanted: int
    """Answers of policies that were refused, or whose reward is out of bounds."""


def read_job(job: StartTuning, tokens_max: int) -> ReadExamples:
    """Read and encode the examples of a job; raises `UserError`."""
    model, settings = Path(job.model), job.settings
    unwanted = 0
    if job.environment is not None:
        reference = job.environment
        environment = load_environment(reference.name, reference.version, reference.options)
        encoder = Encoder(model, tokens_max, environment)
        tasks = draw_tasks(environment, 2 * settings.steps * settings.batch, settings.seed)
        encoded = [[encoder.encode(task)] for task in tasks]
    else:
        encoder = Encoder(model, tokens_max)
        records = Records(Path(job.data), job.reading, encoder.renderer)
        if settings.loss == "preferences":
            encoded = [[encoder.encode(each) for each in pair] for pair in records.pairs()]
        else:
            encoded = [[encoder.encode(record)] for record in records]
        unwanted = records.unwanted
    whole = [[each for each in example if each is not None] for example in encoded]
    found = [Example(some) for some, example in zip(whole, encoded, strict=True) if some == example]
    return ReadExamples(found, len(encoded) - len(found), unwanted)


def batch_of(examples: Sequence[Example]) -> Batch:
    """A batch of the episodes of some examples, in order."""
    return as_batch([rollout for example in examples for rollout in example.rollouts])


def as_batch(rollouts: Sequence[Rollout]) -> Batch:
    """Make a batch of episodes that shall be learned."""
    groups = [Group([each], [0.0], policy=0) for each in rollouts]
    return make_batch(groups, Objective())
