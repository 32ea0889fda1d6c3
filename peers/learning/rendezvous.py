"""How the ranks that start together find each other, in a store that may outlive them.

`torchrun` starts all ranks anew when one dies or a node comes back. Each node's agent does so by
itself, and they do not count these starts alike, so nothing that `torchrun` sets names a start.
Here rank 0 names it, and the others answer: a name and its answers are never those of an earlier
start, whose keys may still be in the store."""

import os
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

from peers.learning.ranks import JOIN_SECONDS, Launch, Store, dist
from swarm.errors import UserError

LOOK_SECONDS = 0.2
"""Time between two looks of a rank for rank 0's answer."""


@dataclass(frozen=True)
class Rendezvous:
    """One start of all ranks."""

    launch: Launch
    store: Store
    """What these ranks have written; no other start's."""
    name: str

    def connect(self) -> Store:
        """Another connection to the store: a wait blocks its connection."""
        return dist.PrefixStore(self.name, _connect(self.launch))


def meet(launch: Launch) -> Rendezvous:
    """Wait for all ranks; raises `UserError` without `torchrun`, `RuntimeError` without a rank."""
    store = _connect(launch, is_master=launch.rank == 0)
    me = uuid.uuid4().hex
    name = _accept(store, launch, me) if launch.rank else _invite(store, launch, me)
    return Rendezvous(launch, dist.PrefixStore(name, store), name)


def _invite(store: Store, launch: Launch, me: str) -> str:
    store.set("start", me)
    answers = [f"{me}/here/{rank}" for rank in range(1, launch.world)]
    try:
        store.wait(answers, timedelta(seconds=JOIN_SECONDS))
    except dist.DistStoreError as error:
        away = [str(rank) for rank, key in enumerate(answers, 1) if not store.check([key])]
        raise RuntimeError(f"no answer of rank {', '.join(away)}") from error
    store.set(f"{me}/all", b",".join(store.get(answer) for answer in answers))
    return me


def _accept(store: Store, launch: Launch, me: str) -> str:
    deadline = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < deadline:
        name = bytes(store.get("start")).decode()
        store.set(f"{name}/here/{launch.rank}", me)
        if store.check([f"{name}/all"]) and me in bytes(store.get(f"{name}/all")).decode():
            return name
        time.sleep(LOOK_SECONDS)
    raise RuntimeError("rank 0 has not seen all ranks")


def _connect(launch: Launch, *, is_master: bool = False) -> Store:
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
    return dist.PrefixStore("swarm", store)
