"""Settings of a role that evaluates policies during the run."""

import pydantic

from swarm.settings import ComputeSettings


class EvaluationSettings(ComputeSettings):
    """How this peer evaluates policies on held-out tasks, beside its work."""

    evaluate_steps: int = pydantic.Field(default=0, ge=0)
    evaluate_tasks: int = pydantic.Field(default=128, ge=1, le=1 << 20)
    evaluate_device: str = "cpu"
