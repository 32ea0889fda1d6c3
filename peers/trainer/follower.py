"""A trainer's rank above 0, started by `torchrun`: no peer, it does each of rank 0's jobs too."""

import importlib
import os
import sys

from swarm.errors import SwarmError, UserError
from swarm.world.child import CHILD_ENVIRONMENT


def run(service: str) -> int:
    """Follow rank 0's service `package.module:Class` until the run ends; return the exit status."""
    for variable, value in CHILD_ENVIRONMENT.items():  # before torch, which reads them, is imported
        os.environ.setdefault(variable, value)
    import torch

    from peers.learning.lead import follow

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        module, _, name = service.partition(":")
        follow(getattr(importlib.import_module(module), name))
    except SwarmError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(run("peers.trainer.service:TrainerService"))
