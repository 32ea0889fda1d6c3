"""The trainer's ranks: processes that hold one policy together, started by `torchrun`.

Every rank runs the same calls in the same order on a service of its own. Rank 0's service is the
child of a peer; the others read what it is asked from the rendezvous store (`lead`, `follow`). A
thread in every rank says every second that it is alive, and ends its process when another falls
silent or ends by an error: torch's collectives alone would wait for it in vain.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed
import trio
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from swarm.errors import SwarmError, UserError
from swarm.jobs import Done, EndTraining
from swarm.world import Job, job_type

dist: Any = torch.distributed  # declares too few of its names
Store = Any
ProcessGroup = Any

COLLECTIVE_SECONDS = 600.0
"""Longest wait of one rank for another within a step; their work is the same, so seconds do."""

SAVE_SECONDS = 3600.0
"""Likewise while a state is written: one rank's disk may be much slower."""

JOIN_SECONDS = 300.0
"""For all ranks to start: each imports torch."""

ALIVE_SECONDS = 1.0
"""How often a rank says that it is there."""

SILENT_SECONDS = 30.0
"""A rank not heard of for this long is dead, and the others stop: half of the minute promised."""

ANSWER_SECONDS = 5.0
"""One question to the store is repeated after this, so that a wait can be given up."""

TEXT_BYTES = 1000
"""Of an error, as one rank tells it to the others."""


class RankError(SwarmError):
    """A rank is gone, or could not do its part; the message names it."""


@dataclass(frozen=True)
class Place:
    """Where `torchrun` put this process."""

    rank: int
    world: int
    local_rank: int

    @staticmethod
    def here() -> Place:
        """From the environment; one process alone has none of it. Raises `UserError`."""
        found = []
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            text = os.environ.get(name, default)
            if not text.isdigit():
                raise UserError(f"the environment's {name} is {text!r}; torchrun sets a number")
            found.append(int(text))
        return Place(*found)


class Ranks:
    """All ranks, as one of them sees them. `Ranks()` is a process alone, without any group."""

    def __init__(self, place: Place | None = None, device: torch.device | None = None) -> None:
        self.rank = place.rank if place else 0
        self.world = place.world if place else 1
        self.device = device or torch.device("cpu")
        self.mesh: DeviceMesh | None = None
        """(replicas, shards), once `make_mesh` was called."""
        self._control: ProcessGroup | None = None
        self._saving: ProcessGroup | None = None

    @staticmethod
    def join(place: Place, store: Store, device: torch.device) -> Ranks:
        """Become one of `place.world` ranks that meet at `store`."""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        ranks = Ranks(place, device)
        ranks._control = dist.new_group(backend="gloo")
        ranks._saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_SECONDS))
        return ranks

    def make_mesh(self, replicas: int) -> DeviceMesh:
        """A mesh of `replicas` whole copies of the policy, each spread over the other ranks.

        Raises `UserError` when the ranks cannot be divided so.
        """
        if replicas < 1 or self.world % replicas:
            raise UserError(
                f"trainer.replicas is {replicas}, which does not divide the {self.world} ranks"
            )
        if not dist.is_initialized():
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                store=dist.HashStore(),
                rank=0,
                world_size=1,
            )
        self.mesh = init_device_mesh(
            self.device.type,
            (replicas, self.world // replicas),
            mesh_dim_names=("replicate", "shard"),
        )
        return self.mesh

    def share(self, lengths: Tensor) -> Tensor:
        """Which of B sequences this rank computes: their indices, int64, ascending.

        Longest first, each to the rank with the fewest tokens so far; every rank finds the same.
        """
        if self.world == 1:
            return torch.arange(len(lengths))
        loads = [0] * self.world
        mine = []
        for index in torch.argsort(lengths, descending=True, stable=True).tolist():
            rank = loads.index(min(loads))
            loads[rank] += int(lengths[index])
            if rank == self.rank:
                mine.append(index)
        return torch.tensor(sorted(mine), dtype=torch.int64)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element by element over all ranks, in fp64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Likewise, the largest."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], how: Any) -> list[float]:
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, how, group=self._control)
        result: list[float] = tensor.tolist()
        return result

    def agree(self, error: BaseException | None = None, *, saving: bool = False) -> None:
        """Wait for all ranks; raises on all of them when one brings an error.

        `saving`: for the thread that writes states, which may not meet the others' main threads.
        """
        if error is not None and self.world == 1:
            raise error
        if self.world == 1:
            return
        text = f"{type(error).__name__}: {error}".encode()[:TEXT_BYTES] if error else b""
        mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        everybody = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everybody, mine, group=self._saving if saving else self._control)
        for rank, words in enumerate(everybody):
            told = bytes(words.tolist()).rstrip(b"\0").decode("utf-8", "replace")
            if told:
                raise RankError(f"rank {rank} of {self.world}: {told}") from error

    @property
    def saving_group(self) -> ProcessGroup | None:
        """For collectives of the thread that writes states."""
        return self._saving


# --- one rank leads, the others follow -----------------------------------------------------------


class _Commands:
    """What rank 0 is asked, in the store, for the others to do as well."""

    def __init__(self, store: Store, place: Place) -> None:
        self._store, self._place = store, place
        self._next = 0

    def give(self, method: str, job: Job) -> None:
        self._store.set(f"command/{self._next}", msgspec.msgpack.encode([method, job]))
        self._next += 1

    def take(self) -> tuple[str, msgspec.Raw]:
        """The next command. While rank 0 lives it may take for ever: it waits for rollouts."""
        key = f"command/{self._next}"
        raw = _wait_for(self._store, key)
        self._next += 1
        if self._next % self._place.world == self._place.rank:  # once is enough
            self._store.delete_key(f"command/{self._next - 10 * self._place.world}")
        return msgspec.msgpack.decode(raw, type=tuple[str, msgspec.Raw])


def _wait_for(store: Store, key: str, deadline_seconds: float | None = None) -> bytes:
    """A key's value once it is set; the watching thread ends the process if a rank dies."""
    waited = 0.0
    while deadline_seconds is None or waited < deadline_seconds:
        try:
            store.wait([key], timedelta(seconds=ANSWER_SECONDS))
        except dist.DistStoreError:  # not yet
            waited += ANSWER_SECONDS
            continue
        return bytes(store.get(key))
    raise RankError(f"{key} was not told within {deadline_seconds:g} s")


class Lead:
    """Rank 0's service: each call is given to the other ranks, then done here as well."""

    def __init__(self, service: Any, commands: _Commands, watch: _Watch) -> None:
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


def lead(make: Callable[[Ranks], Any]) -> Any:
    """The service of a process alone, or, under `torchrun`, rank 0's part of all ranks'.

    `make(ranks)` makes a service. Raises `UserError`.
    """
    place = Place.here()
    if place.world == 1:
        return make(Ranks(device=_device(place)))
    ranks, store, watch = _meet(place)
    return Lead(make(ranks), _Commands(store, place), watch)


def follow(make: Callable[[Ranks], Any]) -> None:
    """Be one of the other ranks until rank 0 ends the run."""
    place = Place.here()
    ranks, store, watch = _meet(place)
    service = make(ranks)
    commands = _Commands(store, place)
    while True:
        method, raw = commands.take()
        if method == "end":
            watch.leave("")
            return
        try:
            function = getattr(service, method)
            trio.run(function, msgspec.msgpack.decode(raw, type=job_type(function)))
        except (UserError, ValueError, RankError) as error:
            print(f"rank {place.rank}: {method}: {error}", file=sys.stderr, flush=True)
        except RuntimeError as error:
            traceback.print_exception(error)
            watch.end(watch.culprit() or f"{method}: {error}")
        except BaseException as error:
            traceback.print_exception(error)
            watch.end(f"{method}: {type(error).__name__}: {error}")


def _meet(place: Place) -> tuple[Ranks, Store, _Watch]:
    store = _connect(place, is_master=place.rank == 0)
    watch = _Watch(place)
    try:
        return Ranks.join(place, store, _device(place)), store, watch
    except (RuntimeError, dist.DistStoreError) as error:
        raise RankError(
            watch.culprit()
            or f"rank {place.rank} of {place.world} could not meet the others "
            f"within {JOIN_SECONDS:g} s: {error}"
        ) from error


def _device(place: Place) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", place.local_rank)
    return torch.device("cpu")


def _connect(place: Place, *, is_master: bool = False) -> Store:
    """The rendezvous store; torchrun's agent serves it, so that it outlives every rank."""
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
            f"WORLD_SIZE is {place.world} but {error} is not set; start all ranks with torchrun"
        ) from error
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # keys of an earlier life are stale
    return dist.PrefixStore(f"swarm-{restart}", store)


class _Watch:
    """Says that this rank lives, and ends its process when another one does not."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store = _connect(place)  # its own: a wait blocks a connection
        self._lock = threading.Lock()
        self._left = False
        self._culprit = ""
        self._found = threading.Event()
        self._told: dict[int, tuple[bytes, float]] = {}
        self._name = f"rank {place.rank} of {place.world} ({socket.gethostname()}, {os.getpid()})"
        self._round = time.monotonic()
        """When the store last answered."""
        atexit.register(self.leave, "its process ended")
        for work in (self._run, self._guard):
            threading.Thread(target=work, name="ranks", daemon=True).start()

    def culprit(self) -> str:
        """Who is to blame for a collective that broke off, as soon as that shows; else empty."""
        self._found.wait(SILENT_SECONDS + 5 * ALIVE_SECONDS)
        return self._culprit

    def leave(self, why: str) -> None:
        """Say that this rank is gone; `why` is empty when all is well."""
        with self._lock:
            if not self._left:
                self._left = True
                try:
                    self._store.set(f"alive/{self._place.rank}", f"gone {self._name}: {why}")
                except (RuntimeError, dist.DistStoreError) as error:
                    print(f"{self._name}: {error}", file=sys.stderr, flush=True)

    def end(self, why: str) -> NoReturn:
        """End this process, loudly."""
        print(f"{self._name} stops: {why}", file=sys.stderr, flush=True)
        self.leave(why)
        os._exit(1)

    def _run(self) -> None:
        count = 0
        while not self._left:
            count += 1
            try:
                with self._lock:
                    if self._left:
                        return
                    self._store.set(f"alive/{self._place.rank}", f"{count} {self._name}")
                self._look()
                self._round = time.monotonic()
            except (RuntimeError, dist.DistStoreError) as error:
                if not self._left:
                    self.end(f"the rendezvous store is gone ({str(error).splitlines()[0]})")
            if self._culprit:
                # A call that a broken collective ended says so in its own words first.
                self._found.set()
                time.sleep(5 * ALIVE_SECONDS)
                self.end(self._culprit)
            time.sleep(ALIVE_SECONDS)

    def _guard(self) -> None:
        """End this process when the store's machine is gone, of which no call to it returns."""
        while not self._left:
            time.sleep(ALIVE_SECONDS)
            if time.monotonic() - self._round > SILENT_SECONDS + 10 * ALIVE_SECONDS:
                words = f"the rendezvous store has not answered for {SILENT_SECONDS:g} s"
                print(f"{self._name} stops: {words}", file=sys.stderr, flush=True)
                os._exit(1)

    def _look(self) -> None:
        """Find out who is silent or gone."""
        now = time.monotonic()
        for rank in range(self._place.world):
            key = f"alive/{rank}"
            if rank == self._place.rank or not self._store.check([key]):
                continue
            words = bytes(self._store.get(key))
            if words.startswith(b"gone "):
                name, _, why = words[5:].decode("utf-8", "replace").partition(": ")
                if why:
                    self._culprit = f"{name} ended: {why}"
                continue
            said, since = self._told.get(rank, (b"", now))
            if words != said:
                self._told[rank] = (words, now)
            elif now - since > SILENT_SECONDS:
                name = words.decode("utf-8", "replace").partition(" ")[2]
                self._culprit = f"{name} has not been heard of for {SILENT_SECONDS:g} s"
