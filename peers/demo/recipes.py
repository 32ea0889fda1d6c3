"""The demos' recipes: a character model of 0.23 million parameters learns a small task.

docs/concepts.md and docs/environments.md have the measured figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from peers.engines.demo import EOS_ID
from swarm.errors import UserError
from swarm.wire.manifest import (
    EnvironmentReference,
    Objective,
    Optimiser,
    Sampling,
    Schedule,
    Thresholds,
)

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
THRESHOLDS = Thresholds(measured_tokens=2_229_646, measured_dtypes=["bfloat16", "float32"])
"""The defaults, which are this model's (docs/benchmarks.md, "Honest workers and cheats")."""
SCHEDULE = Schedule(steps=250, groups_per_step=32, asynchrony=2, max_staleness=4, old="generation")
CALCULATOR = EnvironmentReference(name="calculator", version="1", options={"digits": 2})

TOOLS = EnvironmentReference(
    name="tools",
    version="1",
    options={"statement": "bare", "digits": 2, "operations": 1, "must_call": True},
)
CODE = EnvironmentReference(name="code", version="2", options={"tests": 3})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What one demo trains on."""

    title: str
    environments: tuple[EnvironmentReference, ...]
    sampling: Sampling = SAMPLING
    schedule: Schedule = SCHEDULE
    optimiser: Optimiser = OPTIMISER
    positions: int = 64
    """The model's context length."""
    accuracy: float = 0.15
    """Where the supervised warm-up stops; see `peers.demo.warmup.Warmup`."""
    warmup_batch: int = 128
    warmup_steps_max: int = 200


RECIPES = {
    "sort-digits": Recipe(title="sort six digits", environments=(ENVIRONMENT,)),
    "calculator": Recipe(
        title="arithmetic with a tool",
        environments=(CALCULATOR,),
        sampling=replace(SAMPLING, max_new_tokens=16),
    ),
    "tools": Recipe(
        title="call a calculator",
        environments=(TOOLS,),
        sampling=replace(SAMPLING, max_new_tokens=28),
    ),
    "code": Recipe(
        title="programs of one line, by hidden tests",
        environments=(CODE,),
        sampling=replace(SAMPLING, max_new_tokens=60),
        schedule=replace(SCHEDULE, groups_per_step=16),
        optimiser=replace(OPTIMISER, learning_rate=1e-3),
        positions=96,
        accuracy=0.25,
        warmup_batch=32,
        warmup_steps_max=1000,
    ),
    "mixture": Recipe(
        title="sort digits, and arithmetic with two kinds of tool",
        environments=(ENVIRONMENT, CALCULATOR, TOOLS),
        sampling=replace(SAMPLING, max_new_tokens=28),
    ),
}
"""By the name that `swarm demo --environment` takes."""


def recipe_of(name: str) -> Recipe:
    """The recipe of a demo; raises `UserError` for a name that none has."""
    if name not in RECIPES:
        raise UserError(f"there is no demo of {name!r}; there are: {', '.join(RECIPES)}")
    return RECIPES[name]
