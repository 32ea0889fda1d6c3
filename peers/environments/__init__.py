"""Tasks and their verifiers: what a run trains on. Imports neither torch nor transformers."""

from peers.environments.base import (
    Curriculum,
    Environment,
    Renderer,
    Task,
    grade,
    load,
    probe_hash,
    split_of,
    task_of,
    task_of_step,
)

__all__ = [
    "Curriculum",
    "Environment",
    "Renderer",
    "Task",
    "grade",
    "load",
    "probe_hash",
    "split_of",
    "task_of",
    "task_of_step",
]
