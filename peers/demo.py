"""The demo's recipe: a character model of 0.23 million parameters learns to sort six digits.

docs/concepts.md has the measured figures.
"""

from __future__ import annotations

from peers.engines.demo import EOS_ID
from swarm.manifest import EnvironmentReference, Objective, Optimiser, Sampling, Schedule

MODEL = "demo/qwen2-0.23m"
ENVIRONMENT = EnvironmentReference(name="sort-digits", version="1")
SAMPLING = Sampling(
    temperature=1.0, max_new_tokens=8, stop_ids=[EOS_ID], group_size=8, groups_per_submission=4
)
OBJECTIVE = Objective(
    epsilon=0.2,
    delta=4.0,
    kl_coefficient=0.0,
    entropy_coefficient=0.0,
)
OPTIMISER = Optimiser(
    gradient_norm_max=0.1,
    learning_rate=6e-4,
    beta1=0.9,
    beta2=0.99,
    warmup_steps=10,
    final_learning_rate_share=0.1,
)
SCHEDULE = Schedule(steps=250, groups_per_step=32, asynchrony=2, max_staleness=4, old="generation")
