"""Supervised fine-tuning: the trainer's other mode, for a policy's warm-up before RL.

Examples are prompts with their answers, from a file or from an environment. They are packed like
RL's completions, and the loss is the mean surprise over the answers' tokens, the stop token
included. One share of them is held back to validate on.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import trio

from peers.environments import Environment, Renderer, task_of
from peers.environments import load as load_environment
from peers.policy import model as policy_model
from peers.policy.config import read_config
from peers.trainer.learning.batch import Batch
from peers.trainer.learning.durable import whole_folder
from peers.trainer.learning.packing import Scorer, fastest_attention, lay_out, lay_out_flat
from peers.trainer.learning.ranks import Ranks
from peers.trainer.learning.schedule import learning_rate
from peers.trainer.learning.sharding import shard
from swarm.errors import UserError
from swarm.jobs import Done, Export, Sharding
from swarm.messages import Optimiser
from swarm.offline_jobs import (
    StartTuning,
    Tune,
    Tuned,
    TuningService,
    TuningSettings,
    TuningStarted,
    Validate,
    Validated,
)
from swarm.rollouts.seeds import digest
from swarm.world.progress import report

LINE_BYTES_MAX = 16 << 20
ENVIRONMENT_EXAMPLES = 100_000
"""Drawn from an environment, at most: a tiny one repeats itself."""

J = TypeVar("J")
R = TypeVar("R")

Example = tuple[list[int], list[int]]
"""Token ids of a prompt and of its answer, the stop token included."""


def check(settings: TuningSettings) -> None:
    """Raises `UserError`."""
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
        self._lock = trio.Lock()

    async def start(self, job: StartTuning) -> TuningStarted:
        """See `TuningService.start`."""
        return await self._alone(self._start, job)

    async def step(self, job: Tune) -> Tuned:
        """See `swarm.offline_jobs.Tune`."""
        return await self._alone(self._step, job)

    async def validate(self, job: Validate) -> Validated:
        """See `swarm.offline_jobs.Validate`."""
        return await self._alone(self._validate, job)

    async def save(self, job: Export) -> Done:
        """Write the policy as a plain Hugging Face folder, durably, in the dtype it came in."""
        return await self._alone(self._save, job)

    async def _alone(self, work: Callable[[J], R], job: J) -> R:
        """Do a job in a worker thread; all of them use the one model."""
        async with self._lock:
            return await trio.to_thread.run_sync(work, job)

    def _start(self, job: StartTuning) -> TuningStarted:
        self._settings = job.settings
        check(self._settings)
        self._base = Path(job.model)
        loaded = policy_model.load(self._base)
        self._dtype: torch.dtype = loaded.dtype
        ranks = Ranks(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self._device = ranks.device
        self._model: Any = loaded.train()
        self._model.set_attn_implementation(fastest_attention(self._device))
        self._scorer = Scorer(self._model)
        shard(self._scorer, self._model.model.layers, ranks, Sharding())
        self._optimiser = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._rates = Optimiser(
            learning_rate=self._settings.learning_rate,
            warmup_steps=self._settings.warmup_steps,
            final_learning_rate_share=self._settings.final_learning_rate_share,
            learning_rate_schedule="cosine",
        )
        renderer = Renderer(self._base)
        stop = stop_id(self._base)
        if job.environment is None:
            source, rows = job.data, _from_file(Path(job.data))
        else:
            drawn = load_environment(
                job.environment.name, job.environment.version, job.environment.options
            )
            source, rows = job.environment.name, _from_environment(drawn, self._settings)
        limit = min(self._settings.tokens_max, self._model.config.max_position_embeddings)
        found, long = [], 0
        for prompt, answer in rows:
            ids = (renderer.encode_prompt(prompt), [*renderer.encode_completion(answer), stop])
            if ids[0] and len(ids[0]) + len(ids[1]) <= limit:
                found.append(ids)
            else:
                long += 1
        random.Random(self._settings.seed).shuffle(found)
        held_back = math.ceil(self._settings.validation_share * len(found))
        self._held_back = found[: min(held_back, self._settings.validation_examples_max)]
        self._examples = found[held_back:]
        if len(self._examples) < 1:
            raise UserError(
                f"{source} leaves no example to train on ({len(found)} of at most "
                f"{limit} tokens, {long} longer or without a prompt)"
            )
        self._order = _repeat(self._examples, self._settings.seed)
        self._done = 0
        return TuningStarted(
            examples=len(self._examples),
            held_back=len(self._held_back),
            left_out=long,
            parameters=policy_model.count_parameters(self._model),
        )

    def _step(self, job: Tune) -> Tuned:
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

    @torch.no_grad()
    def _validate(self, job: Validate) -> Validated:
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

    def _save(self, job: Export) -> Done:
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


def as_batch(examples: Sequence[Example]) -> Batch:
    """Examples as a batch whose completions are their answers."""
    return Batch(
        tokens=torch.tensor([token for prompt, answer in examples for token in (*prompt, *answer)]),
        sampled=torch.tensor(
            [
                mask
                for prompt, answer in examples
                for mask in (*[False] * len(prompt), *[True] * len(answer))
            ]
        ),
        lengths=torch.tensor([len(prompt) + len(answer) for prompt, answer in examples]),
        completion_lengths=torch.tensor([len(answer) for _, answer in examples]),
        advantage=torch.zeros(len(examples)),
        policy=torch.zeros(len(examples), dtype=torch.int64),
        temperature=torch.ones(len(examples), dtype=torch.float64),
    )


def stop_id(folder: Path) -> int:
    """The token that ends an answer, as the model's config names it; raises `UserError`."""
    found = read_config(folder).get("eos_token_id")
    if isinstance(found, list) and found:
        found = found[0]
    if not isinstance(found, int):
        raise UserError(
            f"model config {folder / 'config.json'}: eos_token_id is {found!r}; it must be the id "
            "of the token that ends an answer"
        )
    return found


def _from_file(path: Path) -> Iterator[tuple[str, str]]:
    """(prompt, answer) of each line of a JSONL file; raises `UserError` naming the line."""
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(LINE_BYTES_MAX + 1)
                if not line:
                    return
                if not line.strip():
                    continue
                yield _example(line, f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error


def _example(line: bytes, where: str) -> tuple[str, str]:
    if len(line) > LINE_BYTES_MAX:
        raise UserError(f"{where} has more than {LINE_BYTES_MAX} bytes")
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f'{where} is not an object with "prompt" and "answer"')
    for key in ("prompt", "answer"):
        if not isinstance(row.get(key), str):
            raise UserError(f"{where}: {key} is {row.get(key)!r}; it must be text")
    return row["prompt"], row["answer"]


def _from_environment(
    environment: Environment, settings: TuningSettings
) -> Iterator[tuple[str, str]]:
    """Training tasks with their answers; only distinct prompts."""
    wanted = min(ENVIRONMENT_EXAMPLES, 2 * settings.steps * settings.batch)
    seen = set()
    for index in range(2 * wanted):
        seed = settings.seed.to_bytes(8, "big") + index.to_bytes(8, "big")
        task = task_of(environment, digest("swarm/1/sft-example", seed))
        if task.prompt in seen:
            continue
        seen.add(task.prompt)
        yield task.prompt, task.answer
        if len(seen) >= wanted:
            return


def _repeat(examples: Sequence[Example], seed: int) -> Iterator[Example]:
    """All examples, epoch after epoch, each in an order of its own."""
    for epoch in itertools.count():
        order = list(range(len(examples)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for index in order:
            yield examples[index]
