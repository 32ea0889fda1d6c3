"""Episodes of 50 turns and 8,000 tokens, through worker, validator and trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peers.engines import demo
from swarm.jobs.training import TrainingTerms
from swarm.wire.manifest import EnvironmentReference, Objective, Optimiser, Sampling, Schedule
from tests.end_to_end.pipeline import pipeline

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower

TURNS = 50
ANSWER_CHARACTERS = 150
ROWS = 2

PACKAGE = f'''
from peers.environments import Episodes, Generated, Task


class Long(Episodes):
    """Answers all but the last of {TURNS} turns at length; its reward follows from all of them."""

    name = "long"
    version = "1"
    safe_for_strangers = True

    def tasks(self):
        return Generated(lambda randomness: Task(prompt=f"{{randomness[0]:03d}}>", answer="0"))

    def start(self, task):
        return []

    def step(self, state, text):
        state.append(text)
        seen = f"{{len(state)}} {{text[:20]}} "
        return (seen * {ANSWER_CHARACTERS})[:{ANSWER_CHARACTERS}] if len(state) < {TURNS} else None

    def grade(self, task, transcript):
        return sum(len(turn.text) for turn in transcript.turns) % 97 / 96
'''

SAMPLING = Sampling(
    temperature=1.0,
    max_new_tokens=6000,
    stop_ids=[demo.EOS_ID, demo.UNKNOWN_ID],
    group_size=ROWS,
    groups_per_submission=1,
)
TERMS = TrainingTerms(
    objective=Objective(epsilon=0.2, delta=4.0, kl_coefficient=0.0, entropy_coefficient=0.0),
    optimiser=Optimiser(learning_rate=1e-3, warmup_steps=2, gradient_norm_max=0.5),
    schedule=Schedule(steps=2, groups_per_step=1),
    sampling=SAMPLING,
)


@pytest.mark.slow
def test_episodes_of_50_turns_are_played_checked_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site/long-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: long\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[swarm.environments]\nlong = long_package:Long\n")
    (tmp_path / "site/long_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    demo.make_policy(tmp_path / "0", seed=3, positions=1 << 14)
    with pipeline(tmp_path, EnvironmentReference(name="long", version="1"), TERMS) as run:
        _, _, rollouts = run.take_step(0)
        figures = run.trained
    lengths = [len(rollouts.rollout(row).tokens) for row in range(ROWS)]
    assert rollouts.segment_counts().tolist() == [2 * TURNS] * ROWS
    assert min(lengths) > 8000
    assert run.learned_steps == 1
    assert figures["tokens"] == rollouts.model_lengths().sum(), "each sampled token counts once"
    assert figures["trained_tokens"] == sum(lengths), "a sequence is computed once, not per turn"
