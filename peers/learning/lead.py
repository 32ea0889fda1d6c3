"""Rank 0 leads, the other ranks follow: every rank does the same jobs in the same order.

Rank 0's service runs in a peer's child process. It writes each of its jobs to the rendezvous store;
the other ranks read the jobs there, and do them on their own services."""

import functools
import sys
import traceback
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import msgspec
import trio

from peers.engines.device import find_device
from peers.learning.ranks import JOIN_SECONDS, Launch, RankError, Ranks, Store, dist
from peers.learning.rendezvous import meet
from peers.learning.watch import Watch
from swarm.errors import UserError
from swarm.world import Job, job_type

LEADS_ONLY = frozenset(
    {
        *("finish_save", "record"),
        *("first_state", "check_state", "inspect", "merge", "export_state", "draw_model"),
    }
)
"""Methods that rank 0 does alone, while all ranks may be training. The first two wait for rank 0's
own threads; the threads that write states agree on success or failure among all ranks. The others
are of the service of one of several trainers, and compute from files alone."""

ANSWER_SECONDS = 60.0
"""Time after which a question to the store is repeated, so that Ctrl-C can end the wait. torch
writes two lines of warning for each that had no answer."""


class Commands:
    """Rank 0's jobs, in the rendezvous store, for the other ranks to do as well."""

    def __init__(self, store: Store, launch: Launch) -> None:
        self._store, self._launch = store, launch
        self._next = 0

    def give(self, method: str, job: Job) -> None:
        """Add a job; every rank does the jobs in this order."""
        self._store.set(f"command/{self._next}", msgspec.msgpack.encode([method, job]))
        self._next += 1

    def take(self) -> tuple[str, msgspec.Raw]:
        """Wait for the next job, without a limit while rank 0 lives: it waits for rollouts."""
        raw = self._wait_for(f"command/{self._next}")
        self._next += 1
        world = self._launch.world
        if self._next % world == self._launch.rank:  # one rank deletes it
            self._store.delete_key(f"command/{self._next - 10 * world}")
        return msgspec.msgpack.decode(raw, type=tuple[str, msgspec.Raw])

    def _wait_for(self, key: str) -> bytes:
        """Wait for a key's value; if a rank dies, `Watch` ends the process."""
        while True:
            try:
                self._store.wait([key], timedelta(seconds=ANSWER_SECONDS))
            except dist.DistStoreError:  # not set yet
                continue
            return bytes(self._store.get(key))


class Lead:
    """Hands rank 0's calls to the other ranks, then does them too; `LEADS_ONLY` alone."""

    def __init__(self, service: Any, commands: Commands, watch: Watch) -> None:
        self._service, self._commands, self._watch = service, commands, watch
        self._turn = trio.Lock()
        """Keeps calls here in the order in which the other ranks get them."""

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        function = getattr(self._service, method)

        async def attempt(job: Job) -> Any:
            try:
                return await function(job)
            except (UserError, ValueError, RankError):
                raise  # every rank raises it too
            except RuntimeError as error:
                # A collective broke off, most often because a rank died.
                culprit = await trio.to_thread.run_sync(self._watch.culprit)
                raise RankError(culprit or str(error)) from error

        @functools.wraps(function)
        async def call(job: Job) -> Any:
            if method in LEADS_ONLY:
                return await attempt(job)
            async with self._turn:
                self._commands.give(method, job)
                return await attempt(job)

        return call

    async def end(self) -> None:
        """End the other ranks: the run is over."""
        self._commands.give("end", Job())
        self._watch.leave("")


def lead(make: Callable[[Ranks], Any], device: str = "auto") -> Any:
    """The service of a single process, or of `torchrun`'s rank 0, leading; raises `UserError`."""
    launch = Launch.here()
    if launch.world == 1:
        return make(Ranks(device=find_device(device)))
    ranks, store, watch = _meet(launch, device)
    return Lead(make(ranks), Commands(store, launch), watch)


def follow(make: Callable[[Ranks], Any]) -> None:
    """Do rank 0's jobs, as another rank, until rank 0 ends the run."""
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
    """Meet the other ranks; rank 0 decides on which kind of `device` all ranks compute."""
    watch = None
    try:
        meeting = meet(launch)
        store, watch = meeting.store, Watch(meeting)
        if launch.rank == 0:
            store.set("device", device)
        found = find_device(bytes(store.get("device")).decode(), launch.local_rank)
        return Ranks.join(launch, store, found), store, watch
    except (RuntimeError, dist.DistStoreError) as error:
        raise RankError(
            (watch.culprit() if watch else "")
            or f"rank {launch.rank} of {launch.world} could not meet the others "
            f"within {JOIN_SECONDS:g} s: {error}"
        ) from error
