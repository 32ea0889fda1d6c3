"""The library: a policy that generates, an environment that grades, and the loss of completions.

Everything runs in this process, on one device. docs/library.md shows a program."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.engines.batch import generate, requests_for
from peers.engines.engine import Engine
from peers.engines.loading import load
from peers.engines.registry import make_engine
from peers.environments import play
from peers.environments.interface import Environment, Grade, Prompt, Split, Task, Transcript
from peers.environments.registry import load_any
from peers.environments.renderer import Renderer, stop_ids_of
from peers.learning import objective as objectives
from peers.learning.advantages import Completions, advantages
from peers.learning.batch import check_rewards, rollout_batch
from peers.learning.formulas import Tokens
from peers.learning.objective import Totals
from peers.learning.packing import lay_out
from peers.learning.policy import score_passes
from peers.learning.scorer import Scorer
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.rollouts.rollout import Rollout
from swarm.rollouts.seeds import digest, noise_key
from swarm.wire.manifest import Objective


@dataclass(frozen=True)
class Completion:
    """One answer of a policy to a prompt."""

    text: str
    """Without the stop token."""
    finished: bool
    """Whether it ended with a stop token rather than at the limit."""
    rollout: Rollout
    """Token ids of prompt and completion, with the completion's log-probabilities."""
    temperature: float
    """At which it was sampled; 1 for the likeliest tokens."""

    @property
    def tokens(self) -> Sequence[int]:
        """The sampled token ids, stop token included."""
        return self.rollout.model_tokens


class Policy:
    """The policy in a Hugging Face folder, loaded into an engine."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.engine = engine
        self.renderer = Renderer(folder)
        self.stop_ids = tuple(stop_ids_of(folder))

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        count: int = 1,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> list[list[Completion]]:
        """Sample `count` completions of each prompt, in one batch; returns them prompt by prompt.

        A prompt is text, or a tuple of `Message` for the folder's chat template. At temperature 0
        the likeliest tokens are taken. The same arguments give the same completions. Raises
        `UserError`, for a prompt that is too long, too."""
        if isinstance(prompts, str):
            raise UserError(f"prompts is the text {prompts[:40]!r}; give a list of prompts")
        if not (count >= 1 and max_new_tokens >= 1 and temperature >= 0):
            raise UserError(
                f"count is {count}, max_new_tokens {max_new_tokens} and temperature "
                f"{temperature:g}; they must be at least 1, 1 and 0"
            )
        key = noise_key(digest("swarm/1/library", str(seed).encode())) if temperature else None
        temperature = temperature or 1.0
        encoded = [self.renderer.encode_prompt(prompt) for prompt in prompts]
        every = [tokens for tokens in encoded for _ in range(count)]
        asked = requests_for(
            every, range(len(every)), key, temperature, self.stop_ids, max_new_tokens
        )
        try:
            pieces = generate(self.engine, asked)
        except ValueError as error:
            raise UserError(f"a prompt cannot be answered: {error}") from error
        made = []
        for prompt, piece in zip(every, pieces, strict=True):
            text, finished = self.renderer.decode_completion(piece.tokens, self.stop_ids)
            rollout = Rollout.single_turn(
                prompt,
                piece.tokens,
                finish=piece.finish,
                log_probabilities=piece.log_probabilities.tolist(),
            )
            made.append(Completion(text, finished, rollout, temperature))
        return [made[at : at + count] for at in range(0, len(made), count)]


def load_policy(
    folder: str | Path, *, engine: str = "native", device: str = "auto", dtype: str = "auto"
) -> Policy:
    """Load the policy in a Hugging Face folder into an engine of this name; raises `UserError`."""
    path = Path(folder)
    return Policy(path, make_engine(engine, path, Hardware(device=device, dtype=dtype)))


def load_environment(name: str, **options: Any) -> Environment:
    """Load an environment that is installed here, with these options; raises `UserError`."""
    return load_any(name, options)


def draw_task(environment: Environment, seed: int, split: Split = "train") -> Task:
    """The task that an environment draws by this seed; raises `UserError`."""
    return play.task_of(environment, digest("swarm/1/library", str(seed).encode()), split)


def grade(environment: Environment, task: Task, completion: Completion) -> Grade:
    """An environment's grade of a completion; raises `UserError` if its code fails."""
    written = Transcript.of(completion.text, finished=completion.finished)
    return play.grade(environment, task, written)


def load_model(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Load a folder's transformers model, for `loss`; raises `UserError`."""
    return load(Path(folder), dtype).eval()  # with dropout, no two passes would agree


def loss(
    model: Any,
    groups: Sequence[Sequence[Completion]],
    rewards: Sequence[Sequence[float]],
    *,
    objective: Objective | None = None,
    reference: Any = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of groups of completions, each group of one prompt, and its metrics.

    model: of `load_model`; the loss has a gradient to its weights. rewards: one per completion.
    objective: GRPO with the defaults of a run, unless given. reference: the model of the KL term,
    by default `model` as it is. The ratio's denominator is what the engine reported; a trainer
    does not believe strangers, and recomputes it. Raises `UserError`."""
    objective = objective or Objective()
    if not groups or not all(groups):
        raise UserError("there is no completion to learn from: groups is empty, or one of them is")
    if [len(group) for group in groups] != [len(each) for each in rewards]:
        raise UserError("rewards must have a list for each group, with a number per completion")
    completions = [each for group in groups for each in group]
    try:
        check_rewards(rewards, [True for _ in rewards], len(completions))
    except ValueError as error:
        raise UserError(f"these groups have no loss: {error}") from error
    temperatures = [each.temperature for each in completions]
    batch = rollout_batch([each.rollout for each in completions], temperatures)
    log_mu = torch.tensor([v for each in completions for v in each.rollout.log_probabilities or ()])
    completion = batch.per_token(torch.arange(len(batch)))
    limit = int(batch.completion_lengths.max())
    some = Completions.of(rewards, batch.completion_lengths)
    advantage = batch.per_token(advantages(objective, some, limit))
    scorer = Scorer(model)
    passes = lay_out(batch) if scorer.packs else lay_out(batch, "padded")
    passes = [rows.to(model.device) for rows in passes]
    log_reference = None
    if objective.needs_reference:
        log_reference = score_passes(Scorer(model if reference is None else reference), passes)
    totals = Totals(batch.token_count(), len(batch), limit)
    total = torch.zeros((), device=model.device)
    sums: dict[str, float] = {}
    for rows in passes:
        log_pi, entropy = scorer(rows, entropy_gradient=bool(objective.entropy_coefficient))
        here = rows.index.cpu()
        old = log_mu[here].to(log_pi.device)
        tokens = Tokens(
            log_pi=log_pi,
            log_old=old,
            log_mu=old,
            advantage=advantage[here].to(log_pi.device),
            entropy=entropy,
            completion=completion[here].to(log_pi.device),
            log_reference=None if log_reference is None else log_reference[rows.index],
            completions=len(batch),
        )
        part, metrics = objectives.loss(objective, tokens, totals)
        total = total + part
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return total, objectives.describe(sums)
