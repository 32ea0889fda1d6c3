"""Rank 0 leads, the other ranks follow: every rank does the same jobs in the same order.

Rank 0's service is the child of a peer. The other ranks read the jobs that it gets from the
rendezvous store, and do them on a service of their own.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import msgspec
import trio

from peers.policy.device import find_device
from peers.trainer.learning.launch import JOIN_SECONDS, Launch, Store, connect, dist
from peers.trainer.learning.ranks import RankError, Ranks
from peers.trainer.learning.watch import Watch
from swarm.errors import UserError
from swarm.jobs import Done, EndTraining
from swarm.world import Job, job_type

ANSWER_SECONDS = 5.0
"""One question to the store is repeated after this, so that a wait can be given up."""


class Commands:
    """The jobs of rank 0, in the store, for the others to do as well."""

    def __init__(self, store: Store, launch: Launch) -> None:
        self._store, self._launch = store, launch
        self._next = 0

    def give(self, method: str, job: Job) -> None:
        """Add a job; every rank does the jobs in this order."""
        self._store.set(f"command/{self._next}", msgspec.msgpack.encode([method, job]))
        self._next += 1

    def take(self) -> tuple[str, msgspec.Raw]:
        """The next job. While rank 0 lives it may take for ever: it waits for rollouts."""
        raw = self._wait_for(f"command/{self._next}")
        self._next += 1
        world = self._launch.world
        if self._next % world == self._launch.rank:  # once is enough
            self._store.delete_key(f"command/{self._next - 10 * world}")
        return msgspec.msgpack.decode(raw, type=tuple[str, msgspec.Raw])

    def _wait_for(self, key: str) -> bytes:
        """A key's value once it is set; the watching thread ends the process if a rank dies."""
        while True:
            try:
                self._store.wait([key], timedelta(seconds=ANSWER_SECONDS))
            except dist.DistStoreError:  # not yet
                continue
            return bytes(self._store.get(key))


class Lead:
    """Rank 0's service: each call is given to the other ranks, then done here as well."""

    def __init__(self, service: Any, commands: Commands, watch: Watch) -> None:
        self._service, self._commands, self._watch = service, commands, watch
        self._turn = trio.Lock()
        """Calls are done in the order in which the other ranks get them."""

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        function = getattr(self._service, method)

        @functools.wraps(function)
        async def call(job: Job) -> Any:
            async with self._turn:
                self._commands.give(method, job)
                try:
                    return await function(job)
                except (UserError, ValueError, RankError):
                    raise  # all ranks alike
                except RuntimeError as error:
                    # A collective broke off: most often because a rank is gone.
                    culprit = await trio.to_thread.run_sync(self._watch.culprit)
                    raise RankError(culprit or str(error)) from error

        return call

    async def end(self, job: EndTraining) -> Done:
        """Let the other ranks end: the run is over."""
        self._commands.give("end", job)
        self._watch.leave("")
        return Done()


def lead(make: Callable[[Ranks], Any], device: str = "auto") -> Any:
    """The service of a process alone, or, under `torchrun`, rank 0's part of all ranks'.

    `make(ranks)` makes a service; every rank computes on a `device` of this kind. Raises
    `UserError`.
    """
    launch = Launch.here()
    if launch.world == 1:
        return make(Ranks(device=find_device(device)))
    ranks, store, watch = _meet(launch, device)
    return Lead(make(ranks), Commands(store, launch), watch)


def follow(make: Callable[[Ranks], Any]) -> None:
    """Be one of the other ranks until rank 0 ends the run."""
    launch = Launch.here()
    ranks, store, watch = _meet(launch)
    service = make(ranks)
    commands = Commands(store, launch)
    while True:
        method, raw = commands.take()
        if method == "end":
            watch.leave("")
            return
        try:
            function = getattr(service, method)
            trio.run(function, msgspec.msgpack.decode(raw, type=job_type(function)))
        except (UserError, ValueError, RankError) as error:
            print(f"rank {launch.rank}: {method}: {error}", file=sys.stderr, flush=True)
        except RuntimeError as error:
            traceback.print_exception(error)
            watch.end(watch.culprit() or f"{method}: {error}")
        except BaseException as error:
            traceback.print_exception(error)
            watch.end(f"{method}: {type(error).__name__}: {error}")


def _meet(launch: Launch, device: str = "") -> tuple[Ranks, Store, Watch]:
    """Meet the other ranks; rank 0 says on which kind of `device` all of them compute."""
    store = connect(launch, is_master=launch.rank == 0)
    watch = Watch(launch)
    try:
        if launch.rank == 0:
            store.set("device", device)
        found = find_device(bytes(store.get("device")).decode(), launch.local_rank)
        return Ranks.join(launch, store, found), store, watch
    except (RuntimeError, dist.DistStoreError) as error:
        raise RankError(
            watch.culprit()
            or f"rank {launch.rank} of {launch.world} could not meet the others "
            f"within {JOIN_SECONDS:g} s: {error}"
        ) from error
