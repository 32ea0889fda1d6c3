"""Honest episodes of two turns, for `benchmarks.detection`: a policy that calls a calculator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peers.calibration.measure import Sample
from peers.engines import demo
from peers.engines.engine import Engine
from peers.engines.episodes import play
from peers.environments import Renderer, task_of
from peers.environments.calculator import Calculator, CalculatorOptions
from peers.environments.episodes import grade_segments
from peers.proofs import toploc
from peers.trainer.warmup import Warmup, warm_up
from peers.validator.evidence.submission import Recomputed
from peers.validator.recompute import Completed, recompute
from swarm.manifest import Sampling, Thresholds
from swarm.rollouts.seeds import digest, noise_key, task_seed

OPTIONS = CalculatorOptions(digits=1)
SAMPLING = Sampling(
    max_new_tokens=16, stop_ids=[demo.EOS_ID], group_size=8, groups_per_submission=64
)
WARMUP = Warmup(accuracy=0.15, batch=64)


def make_tool_policy(folder: Path, seed: int) -> Path:
    """Write a policy that calls the tool in about half of its episodes."""
    demo.make_policy(folder, seed)
    warm_up(folder, [Calculator(OPTIONS)], seed, WARMUP)
    return folder


@dataclass(frozen=True)
class Episodes:
    """Submissions of a policy that plays with the calculator."""

    folder: Path

    def sample(self, worker: Engine, validator: Engine, number: int, name: str) -> Sample:
        """Let `worker` play submission `number`, and recompute it.

        `Sample.completions` counts the model's segments, so that two turns are two.
        """
        seed = digest("swarm/1/episodes", name.encode(), number.to_bytes(8, "big"))
        environment, renderer = Calculator(OPTIONS), Renderer(self.folder)
        size, groups = SAMPLING.group_size, SAMPLING.groups_per_submission
        tasks = [task_of(environment, task_seed(seed, row // size)) for row in range(groups * size)]
        rows = range(len(tasks))
        work = [(environment, task) for task in tasks]
        played = play(worker, renderer, work, rows, noise_key(seed), SAMPLING)
        chunks = [
            toploc.chunk_rows(*each)
            for each in zip(played.prompt_hidden, played.hidden, strict=True)
        ]
        proofs = iter(toploc.build([chunk for row in chunks for chunk in row]))
        given = Completed(
            sequences=[rollout.tokens for rollout in played.rollouts],
            sampled=[rollout.sampled for rollout in played.rollouts],
            rows=rows,
            proofs=[[next(proofs) for _ in row] for row in chunks],
        )
        found = recompute(validator, given, noise_key(seed), SAMPLING.temperature, Thresholds())
        outcomes = [
            [
                grade_segments(
                    environment, task, renderer, rollout.segments, SAMPLING.stop_ids
                ).reward,
                float(rollout.segments[-1].finish == "stop"),
                float(len(rollout.model_tokens)),
            ]
            for task, rollout in zip(tasks, played.rollouts, strict=True)
        ]
        firsts = range(0, len(tasks), size)
        recomputed = Recomputed(
            margins=found.margins,
            errors=found.errors,
            ties=[found.ties[first : first + size] for first in firsts],
            outcomes=[
                [[each[kind] for each in outcomes[first : first + size]] for first in firsts]
                for kind in range(3)
            ],
        )
        segments = sum(
            segment.kind == "model" for rollout in played.rollouts for segment in rollout.segments
        )
        return Sample(found, recomputed, segments)
