"""Tasks and their verifiers: what a run trains on. Imports neither torch nor transformers."""

from peers.environments.base import (
    Curriculum,
    Environment,
    MultiTurn,
    Renderer,
    Task,
    grade,
    multi_turn,
    probe_hash,
    split_of,
    task_of,
    task_of_step,
)
from peers.environments.registry import load

__all__ = [
    "Curriculum",
    "Environment",
    "MultiTurn",
    "Renderer",
    "Task",
    "grade",
    "load",
    "multi_turn",
    "probe_hash",
    "split_of",
    "task_of",
    "task_of_step",
]
