"""`python -m peers.trainer.follower`: a trainer's rank above 0, started by `torchrun`.

It is no peer: it holds its part of the policy and does what rank 0 does, when rank 0 does it.
"""

from __future__ import annotations

import os
import sys

from swarm.errors import SwarmError, UserError
from swarm.world.child import ONE_THREAD


def main() -> int:
    """The exit status."""
    for variable, value in ONE_THREAD.items():  # before torch, which reads them, is imported
        os.environ.setdefault(variable, value)
    import torch

    from peers.trainer.learning.lead import follow
    from peers.trainer.service import TrainerService

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        follow(TrainerService)
    except SwarmError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
