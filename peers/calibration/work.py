"""A submission without a network: its work, what a worker hands in, and what a validator finds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from peers.engines.batch import generate, requests_for
from peers.engines.config import read_text_config
from peers.engines.engine import Engine
from peers.environments import Environment, Renderer, Task, task_of
from peers.proofs import toploc
from peers.validator.recompute import Completed, Found, recompute
from swarm.errors import UserError
from swarm.rollouts.seeds import digest, noise_key, task_seed
from swarm.wire.manifest import Sampling, Thresholds

DRAWS_MAX = 16
"""Tasks that are tried for one group."""


@dataclass(frozen=True)
class Work:
    """One submission's work; a row is a rollout."""

    seed: bytes
    prompts: list[list[int]]
    """[rows] The rows of a group have the same prompt."""

    def key(self) -> tuple[int, int]:
        """The key of the submission's noise."""
        return noise_key(self.seed)


def seed_of(number: int, name: str = "calibration") -> bytes:
    return digest("swarm/1/calibration", name.encode(), number.to_bytes(8, "big"))


class Workload:
    """Draws the work of a model's submissions. Groups take the environments in turn."""

    def __init__(
        self, folder: Path, sampling: Sampling, environments: Sequence[Environment]
    ) -> None:
        self.sampling = sampling
        self.renderer = Renderer(folder)
        self._positions: int = read_text_config(folder)["max_position_embeddings"]
        self._environments = environments

    def work(self, number: int) -> Work:
        seed, size = seed_of(number), self.sampling.group_size
        return Work(seed, [tokens for _, _, tokens in self.drawn(seed) for _ in range(size)])

    def drawn(self, seed: bytes) -> list[tuple[Environment, Task, list[int]]]:
        """[groups] Environment, task and prompt of each group of a submission."""
        among = self._environments
        return [
            (environment, *self._drawn(environment, seed, group))
            for group in range(self.sampling.groups_per_submission)
            for environment in [among[group % len(among)]]
        ]

    def _drawn(self, environment: Environment, seed: bytes, group: int) -> tuple[Task, list[int]]:
        """A group's task and prompt, the first that renders and leaves room; raises `UserError`."""
        groups, problem = self.sampling.groups_per_submission, ""
        for attempt in range(DRAWS_MAX):
            try:
                task = task_of(environment, task_seed(seed, group + attempt * groups))
                tokens = self.renderer.encode_prompt(task.prompt)
            except UserError as error:
                problem = str(error)
                continue
            if 0 < len(tokens) <= self._positions - self.sampling.max_new_tokens:
                return task, tokens
            problem = f"a prompt of {len(tokens)} tokens"
        raise UserError(
            f"environment {environment.name!r} draws no prompt to measure with in {DRAWS_MAX} "
            f"tries; the last one failed: {problem}"
        )


@dataclass(frozen=True)
class HandedIn:
    """A submission's completions and proofs, row by row."""

    completions: list[list[int]]
    proofs: list[list[bytes]]
    log_probabilities: list[float] = field(default_factory=list)
    """[tokens] As the engine reports them, of all completions end to end."""


def hand_in(engine: Engine, work: Work, sampling: Sampling) -> HandedIn:
    """Do the work of a submission honestly."""
    pieces = generate(
        engine,
        requests_for(
            work.prompts,
            range(len(work.prompts)),
            work.key(),
            sampling.temperature,
            sampling.stop_ids,
            sampling.max_new_tokens,
        ),
    )
    proofs = prove([each.prompt_hidden for each in pieces], [each.hidden for each in pieces])
    reported = [value for each in pieces for value in each.log_probabilities.tolist()]
    return HandedIn([piece.tokens for piece in pieces], proofs, reported)


def prove(prompt_hidden: Sequence[Tensor], hidden: Sequence[Tensor]) -> list[list[bytes]]:
    chunks = [toploc.chunk_rows(*each) for each in zip(prompt_hidden, hidden, strict=True)]
    proofs = iter(toploc.build([chunk for row in chunks for chunk in row]))
    return [[next(proofs) for _ in row] for row in chunks]


@dataclass(frozen=True)
class Sample:
    """One submission, recomputed."""

    found: Found
    lengths: Sequence[int]
    """Tokens of each rollout."""
    differences: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), kw_only=True)
    """[tokens] Between the log-probabilities that worker and validator have for each token."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def find(validator: Engine, work: Work, sampling: Sampling, handed_in: HandedIn) -> Found:
    """What a validator finds of a submission."""
    completions = handed_in.completions
    sequences = [
        [*prompt, *tokens] for prompt, tokens in zip(work.prompts, completions, strict=True)
    ]
    given = Completed(
        sequences=sequences,
        sampled=[
            list(range(len(prompt), len(sequence)))
            for prompt, sequence in zip(work.prompts, sequences, strict=True)
        ],
        rows=range(len(sequences)),
        proofs=handed_in.proofs,
    )
    return recompute(validator, given, work.key(), sampling.temperature, Thresholds(), scored=True)
