"""Tasks and their verifiers: what a run trains on. Imports neither torch nor transformers."""

from peers.environments.base import (
    Environment,
    Renderer,
    Task,
    load,
    probe_hash,
    split_of,
)

__all__ = ["Environment", "Renderer", "Task", "load", "probe_hash", "split_of"]
