"""How `torchrun` started this process, and the rendezvous store of its ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from swarm.errors import UserError

dist: Any = torch.distributed  # its type stubs lack some names
Store = Any

JOIN_SECONDS = 300.0
"""Time for all ranks to start: each imports torch."""


@dataclass(frozen=True)
class Launch:
    """This process among those that `torchrun` started."""

    rank: int
    world: int
    local_rank: int

    @staticmethod
    def here() -> Launch:
        """Read it from the environment; by default a single process. Raises `UserError`."""
        found = []
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            text = os.environ.get(name, default)
            if not text.isdigit():
                raise UserError(f"the environment's {name} is {text!r}; torchrun sets a number")
            found.append(int(text))
        return Launch(*found)


def connect(launch: Launch, *, is_master: bool = False) -> Store:
    """Connect to the rendezvous store; torchrun's agent serves it, so it outlives every rank."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=is_master and not served,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
        )
    except KeyError as error:
        raise UserError(
            f"WORLD_SIZE is {launch.world} but {error} is not set; start all ranks with torchrun"
        ) from error
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # an earlier start's keys are stale
    return dist.PrefixStore(f"swarm-{restart}", store)
