"""Fine-tuning without a network: the loop of `swarm sft` and `swarm dpo`.

Examples are packed like RL's completions. The loss weighs the log-probability of each token that
the model wrote; all other tokens are inputs only."""

import hashlib
import itertools
import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from peers.engines.config import read_text_config
from peers.engines.model import count_parameters
from peers.environments import load as load_environment
from peers.learning import states
from peers.learning.batch import Batch, rollout_batch
from peers.learning.descent import descend
from peers.learning.examples import Encoder, draw_tasks, encode_examples, read_examples
from peers.learning.mixture import Mixture
from peers.learning.policy import TrainedPolicy, blank_model
from peers.learning.ranks import Ranks
from peers.learning.settings import LearnerSettings
from swarm.errors import UserError
from swarm.jobs import offline
from swarm.jobs.training import Export
from swarm.rollouts.rollout import Rollout
from swarm.wire.manifest import Objective, Optimiser, Schedule
from swarm.world.progress import report
from swarm.world.tasks import JobThread, in_job_thread

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


class Answers:
    """Mean negative log-probability of the model's tokens, stop tokens included."""

    def weigh(
        self, examples: Sequence[Example], batch: Batch, score: Score
    ) -> tuple[Tensor, float | None]:
        """Each token's weight, fp32 [n], and the loss; None: it is −Σ weight · log π itself."""
        count = batch.token_count()
        return torch.full((count,), 1 / count), None

    def judge(self, examples: Sequence[Example], batch: Batch, score: Score) -> offline.Validated:
        """Measure the policy on examples held back."""
        scores = score(examples)
        whole = _sums(scores, batch.completion_lengths).exp().mean()
        return offline.Validated(loss=-float(scores.mean()), answer_probability=float(whole))


class Preferences:
    """DPO (Rafailov et al. 2023, 2305.18290): −log σ(β · margin), mean over the pairs. The margin:
    how much more log-probability the chosen answer gained over the reference than the rejected.
    `answer_weight` adds the mean negative log-probability of the chosen answers, which keeps them
    from becoming less likely together with the rejected ones (Pang et al. 2024, 2404.19733)."""

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
        weights = batch.per_token(torch.stack([pull, -pull], dim=1).flatten())
        chosen = batch.per_token(torch.tensor([1.0, 0.0]).repeat(len(examples)))
        share = chosen * self._answer_weight / chosen.sum()
        value = -logsigmoid(self._beta * margin).mean() - (share * scores).sum()
        return weights + share, float(value)

    def judge(self, examples: Sequence[Example], batch: Batch, score: Score) -> offline.Validated:
        margin = self._margins(score(examples), examples, batch)
        return offline.Validated(
            loss=-float(logsigmoid(self._beta * margin).mean()),
            preferred=float((margin > 0).float().mean()),
            margin=float(margin.mean()),
        )

    def _margins(self, scores: Tensor, examples: Sequence[Example], batch: Batch) -> Tensor:
        sums = _sums(scores, batch.completion_lengths)
        return sums[0::2] - sums[1::2] - torch.tensor([each.reference for each in examples])


def _sums(scores: Tensor, lengths: Tensor) -> Tensor:
    """The sum of each episode's scores [n], by their numbers of tokens."""
    return torch.stack([each.sum() for each in torch.split(scores, lengths.tolist())])


RATES = {"answers": 0.1, "preferences": 0.005}
"""Learning rates times the model's width (hidden size): AdamW's best rate falls as the width grows
(Yang et al. 2022, 2203.03466). Measured at widths 96 and 576 for answers, and at 96 alone for
preferences; at 4,096 they are 2.4e-5 and 1.2e-6."""


def check(settings: offline.TuningSettings) -> None:
    """Check the settings' bounds; raises `UserError`."""
    rate = settings.learning_rate
    for name, fine, bounds in (
        ("steps", settings.steps >= 1, "at least 1"),
        ("batch", settings.batch >= 1, "at least 1"),
        ("learning_rate", rate is None or 0 < rate < 1, "above 0 and below 1"),
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
    def start(self, job: offline.StartTuning) -> offline.TuningStarted:
        self._settings = job.settings
        check(self._settings)
        self._job = job
        self._base = Path(job.model)
        self._load()
        left_out = self._split(job)
        self._loss: Answers | Preferences = Answers()
        if self._pairs:
            self._loss = Preferences(self._settings.beta, self._settings.answer_weight)
            self._loss.refer(self._examples + self._held_back, self._settings.batch, self._score)
        self._done = self._resume(Path(job.state)) if job.state else 0
        return offline.TuningStarted(
            examples=len(self._examples),
            held_back=len(self._held_back),
            left_out=left_out,
            parameters=count_parameters(self._policy.model),
            learning_rate=self._rate,
            steps_done=self._done,
        )

    @property
    def _pairs(self) -> bool:
        """Whether an example is a pair of a chosen and a rejected answer."""
        return self._settings.loss == "preferences"

    def _load(self) -> None:
        settings, width = self._settings, read_text_config(self._base)["hidden_size"]
        self._rate = settings.learning_rate or RATES[settings.loss] / width
        numbers = Optimiser(
            learning_rate=self._rate,
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
            if facts.get("job") == self._digest():
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

    def _split(self, job: offline.StartTuning) -> int:
        """Encode examples and hold some back; return how many were left out. Raises `UserError`."""
        settings = self._settings
        limit = min(settings.tokens_max, self._policy.model.config.max_position_embeddings)
        sources, left_out, unwanted = read_job(job, limit)
        self._examples: list[Example] = []
        held: list[Example] = []
        sizes: list[int] = []
        for number, found in enumerate(sources):
            random.Random(settings.seed).shuffle(found)
            held_back = math.ceil(settings.validation_share * len(found))
            held += found[:held_back]
            self._examples += found[held_back:]
            sizes.append(len(found) - held_back)
            if not sizes[-1]:
                named = job.data[number:][: 1 if job.weights else None]
                source = ", ".join(named) or (job.environment.name if job.environment else "")
                raise UserError(
                    f"{source} leaves no example to train on ({len(found)} of at most "
                    f"{limit} tokens, {left_out} longer or without a prompt, {unwanted} refused or "
                    "outside --reward); give more data"
                    + (", or a larger --tokens-max" if left_out else "")
                    + (", or a wider --reward" if unwanted else "")
                    + "; a pair needs answers of unequal reward to a prompt" * self._pairs
                )
        every = math.ceil(len(held) / settings.validation_examples_max)
        self._held_back = held[:: max(1, every)]
        self._mixture = Mixture(sizes, settings.seed, job.weights)
        self._starts = [0, *itertools.accumulate(sizes)]
        return left_out

    @in_job_thread
    def step(self, job: offline.Tune) -> offline.Tuned:
        places = self._mixture.batch(self._done, self._settings.batch)
        examples = [self._examples[self._starts[source] + index] for source, index in places]
        batch = batch_of(examples)
        weights, value = self._loss.weigh(examples, batch, self._score)
        policy = self._policy
        weights = weights.to(policy.ranks.device)
        policy.optimiser.zero_grad()
        total = torch.zeros((), device=policy.ranks.device)
        for rows in policy.passes(batch):
            report()
            loss = -(policy.scorer(rows, entropy=False)[0] * weights[rows.index]).sum()
            loss.backward()
            total += loss.detach()
        rate = self._learning.learning_rate(self._done)
        found = descend(policy, {"loss": total}, self._settings.gradient_norm_max, rate)
        self._done += 1
        return offline.Tuned(
            step=self._done,
            loss=found["loss"] if value is None else value,
            gradient_norm=found["gradient_norm"],
            learning_rate=rate,
            tokens=batch.token_count(),
            skipped=bool(found["skipped"]),
        )

    def _score(self, examples: Sequence[Example]) -> Tensor:
        """Log-probabilities of the tokens that the model wrote, fp32 [n], on the CPU."""
        return self._policy.score(self._policy.passes(batch_of(examples))).cpu()

    @in_job_thread
    def validate(self, job: offline.Validate) -> offline.Validated:
        if not self._held_back:
            return offline.Validated()
        return self._loss.judge(self._held_back, batch_of(self._held_back), self._score)

    @in_job_thread
    def save_state(self, job: offline.SaveState) -> None:
        facts = {"steps": self._done, "job": self._digest()}
        states.write(Path(job.folder), self._policy.state(), facts, self._policy.ranks)

    @in_job_thread
    def save(self, job: Export) -> None:
        """Write the policy as a plain Hugging Face folder, durably, in its original dtype."""
        self._policy.write(Path(job.folder), self._policy.snapshot())

    def _digest(self) -> str:
        """What a state belongs to: the job, and what its data hold."""
        told = msgspec.structs.replace(self._job, state="")
        hasher = hashlib.sha256(msgspec.json.encode(told))
        for example in self._examples:
            for rollout in example.rollouts:
                hasher.update(array("I", rollout.tokens))
        return hasher.hexdigest()


_SERVICE: type[offline.TuningService] = Tuning


def read_job(job: offline.StartTuning, tokens_max: int) -> tuple[list[list[Example]], int, int]:
    """Read a job's examples; also counts those left out and refused; raises `UserError`."""
    model, settings = Path(job.model), job.settings
    if job.environment is not None:
        reference = job.environment
        environment = load_environment(reference.name, reference.version, reference.options)
        tasks = draw_tasks(environment, 2 * settings.steps * settings.batch, settings.seed)
        encoder = Encoder(model, tokens_max, environment)
        found, left_out = encode_examples(((each,) for each in tasks), encoder)
        return [list(map(Example, found))], left_out, 0
    pairs = settings.loss == "preferences"
    read = [read_examples(data, model, tokens_max, job.reading, pairs=pairs) for data in job.data]
    sources = [list(map(Example, found)) for found, _, _ in read]
    if not job.weights:
        sources = [list(itertools.chain.from_iterable(sources))]
    return sources, sum(each for _, each, _ in read), sum(each for _, _, each in read)


def batch_of(examples: Sequence[Example]) -> Batch:
    """A batch of the episodes of some examples, in order."""
    rollouts = [rollout for example in examples for rollout in example.rollouts]
    return rollout_batch(rollouts, [1.0 for _ in rollouts])
