"""Several ranks on this machine, over gloo: forked, because an import of torch takes seconds."""

from __future__ import annotations

import io
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peers.learning.ranks import Launch, Ranks

DEADLINE_SECONDS = 120.0


def run_ranks(world: int, folder: Path, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(ranks, *arguments)` on every rank; what each returned. Raises what one of them raised.

    `folder` is where they meet.
    """
    context = multiprocessing.get_context("fork")
    processes, pipes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        launch = Launch(rank, world, rank)
        process = context.Process(target=_be, args=(launch, folder, theirs, work, arguments))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    results = []
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(DEADLINE_SECONDS):
                raise AssertionError(f"rank {rank} said nothing for {DEADLINE_SECONDS:g} s")
            fine, result = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            if not fine:
                raise AssertionError(f"rank {rank}: {result}")
            results.append(result)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
    return results


def _be(
    launch: Launch, folder: Path, pipe: Any, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        store = torch.distributed.FileStore(str(folder / "meeting"), launch.world)  # type: ignore[attr-defined]
        ranks = Ranks.join(launch, store, torch.device("cpu"))
        result = (True, work(ranks, *arguments))
    except BaseException:
        result = (False, traceback.format_exc())
    buffer = io.BytesIO()
    torch.save(result, buffer)  # not the pipe's own way, which shares a tensor's memory
    pipe.send_bytes(buffer.getvalue())
    pipe.close()
    os._exit(0)  # not through pytest's own exits
