"""The ranks that `torchrun` started to hold one policy together, and their collectives."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from trio._core import _thread_cache

from swarm.errors import SwarmError, UserError
from swarm.world.tasks import J, JobThread, R

dist: Any = torch.distributed  # its type stubs lack some names
Store = Any
ProcessGroup = Any

JOIN_SECONDS = 300.0
"""Time for all ranks to start: each imports torch."""

COLLECTIVE_SECONDS = 600.0
"""Longest wait of one rank for another within a step. All do the same work, so waits are short."""

SAVE_SECONDS = 3600.0
"""Longest such wait while a state is written: one rank's disk may be much slower."""

ERROR_BYTES = 1000
"""Longest error text that a rank sends to the others."""


class RankError(SwarmError):
    """A rank died, or could not do its part; the message names it."""


@dataclass(frozen=True)
class Launch:
    """This process among those that `torchrun` started."""

    rank: int
    world: int
    local_rank: int

    @classmethod
    def here(cls) -> Self:
        """Read it from the environment; by default a single process. Raises `UserError`."""
        found = []
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            text = os.environ.get(name, default)
            if not text.isdigit():
                raise UserError(f"the environment's {name} is {text!r}; torchrun sets a number")
            found.append(int(text))
        return cls(*found)


class Ranks:
    """All ranks, as one of them sees them. `Ranks()` is a single process without a group."""

    def __init__(self, launch: Launch | None = None, device: torch.device | None = None) -> None:
        self.rank = launch.rank if launch else 0
        self.world = launch.world if launch else 1
        self.device = device or torch.device("cpu")
        self.mesh: DeviceMesh | None = None
        """(replicas, shards), or (replicas, shards, tensor); set by `make_mesh`."""
        self.together = 1
        """Neighbouring ranks on the same sequences: they divide matrices or share the tokens."""
        self.sharing: ProcessGroup | None = None
        """The neighbours that share the tokens of their sequences; set by `make_mesh`."""
        self._control: ProcessGroup | None = None
        self.saving_group: ProcessGroup | None = None
        """The group for collectives of the thread that writes states."""

    @classmethod
    def join(cls, launch: Launch, store: Store, device: torch.device) -> Self:
        """Become one of `launch.world` ranks that meet at `store`."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            _backend(device),
            store=dist.PrefixStore("group", store),
            rank=launch.rank,
            world_size=launch.world,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        ranks = cls(launch, device)
        ranks._control = dist.new_group(backend="gloo")
        ranks.saving_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_SECONDS))
        return ranks

    @property
    def parts(self) -> int:
        """Parts into which a batch's sequences are divided."""
        return self.world // self.together

    def make_mesh(self, replicas: int, tensor: int = 1, sequence: int = 1) -> DeviceMesh:
        """Make a mesh of `replicas` whole copies of the policy, each sharded over its own ranks,
        of which `tensor` neighbours divide each matrix, or `sequence` neighbours share the tokens.

        These numbers divide the ranks (`sharding.check_layout`)."""
        if not dist.is_initialized():
            dist.init_process_group(
                _backend(self.device), store=dist.HashStore(), rank=0, world_size=1
            )
        self.together = tensor * sequence
        if sequence > 1:
            deadline = timedelta(seconds=COLLECTIVE_SECONDS)
            self.sharing, _ = dist.new_subgroups(sequence, timeout=deadline)
        sizes = {"replicate": replicas, "shard": self.world // tensor // replicas}
        if tensor > 1:
            sizes["tensor"] = tensor
        self.mesh = init_device_mesh(
            self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
        return self.mesh

    def share(self, lengths: Sequence[int], first: int = 0) -> list[int]:
        """Indices of this rank's sequences, ascending: each goes to the part with fewest tokens."""
        if self.parts == 1:
            return list(range(len(lengths)))
        loads = [0] * self.parts
        mine = []
        for index, length in enumerate(lengths):
            part = loads.index(min(loads))
            loads[part] += length
            if (part + first) % self.parts == self.rank // self.together:
                mine.append(index)
        return mine

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum over the parts of a batch, element by element, in fp64."""
        return [value / self.together for value in self._reduce(values, dist.ReduceOp.SUM)]

    def max(self, values: Sequence[float]) -> list[float]:
        """Maximum over all ranks, element by element."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], how: Any) -> list[float]:
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, how, group=self._control)
        result: list[float] = tensor.tolist()
        return result

    def agree(self, error: BaseException | None = None, *, saving: bool = False) -> None:
        """Wait for all ranks; raise on every rank if one of them passes an error.

        `saving`: set by the thread that writes states. Its collectives use a group of their own, so
        that they do not mix with the main threads'."""
        if error is not None and self.world == 1:
            raise error
        if self.world == 1:
            return
        text = f"{type(error).__name__}: {error}".encode()[:ERROR_BYTES] if error else b""
        mine = torch.zeros(ERROR_BYTES, dtype=torch.uint8)
        mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(gathered, mine, group=self.saving_group if saving else self._control)
        for rank, raw in enumerate(gathered):
            reason = bytes(raw.tolist()).rstrip(b"\0").decode("utf-8", "replace")
            if reason:
                raise RankError(f"rank {rank} of {self.world}: {reason}") from error


def _backend(device: torch.device) -> str:
    """The collectives' libraries; gloo serves host memory, where `cpu_offload` puts weights."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


class LearnerThread(JobThread):
    """Collectives must come in the same order on every rank, on its own device."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._device = ranks.device
        # Each thread has its own cache of how operations on sharded tensors are done; a new thread,
        # which trio starts for a step after ten idle seconds, works all of them out again.
        _thread_cache.IDLE_TIMEOUT = int(threading.TIMEOUT_MAX)

    async def run(self, work: Callable[[J], R], job: J) -> R:
        def on_device(job: J) -> R:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own
            return work(job)

        return await super().run(on_device, job)
