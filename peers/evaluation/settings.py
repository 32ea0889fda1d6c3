"""Settings of a role that evaluates policies during the run."""

import pydantic

from swarm.settings import ComputeSettings


class EvaluationSettings(ComputeSettings):
    """How this peer evaluates policies on held-out tasks, beside its work."""

    evaluate_steps: int = pydantic.Field(default=0, ge=0)
    """Steps between evaluations during the run: a child of its own, at the lowest priority, plays
    held-out tasks with the newest policy, unless another peer has evaluated it. 0: none."""
    evaluate_tasks: int = pydantic.Field(default=128, ge=1, le=1 << 20)
    """Held-out tasks of each environment in such an evaluation; one sample each."""
    evaluate_device: str = "cpu"
    """Device of these evaluations. One that nothing else uses costs the role nothing."""
