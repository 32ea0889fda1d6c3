"""What benchmarks share: readers of their options, and the reporting of measurements.

Bad options are refused with one sentence before any work. Of repeated values the median is reported
with the least and the most, never the best alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")


def at_least(least: int) -> Callable[[str], int]:
    """Reader of a whole number of at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return read


def several(read_one: Callable[[str], _T], least: int = 1) -> Callable[[str], list[_T]]:
    """Reader of at least `least` comma-separated values."""

    def read(text: str) -> list[_T]:
        found = [read_one(each) for each in text.split(",")]
        if len(found) < least:
            raise argparse.ArgumentTypeError(f"{text!r} names {len(found)}, fewer than {least}")
        return found

    return read


def spread(name: str, values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """`name`: the median of the values; `name`_least and `name`_most: their minimum and maximum."""
    told = {"": statistics.median(values), "_least": min(values), "_most": max(values)}
    return {name + suffix: round(value, digits) for suffix, value in told.items()}


def spread_of(values: Iterable[float], digits: int = 2) -> dict[str, float]:
    """Median, minimum, maximum and number of at least one value."""
    found = list(values)
    told = {"median": statistics.median(found), "least": min(found), "most": max(found)}
    return {name: round(value, digits) for name, value in told.items()} | {"count": len(found)}


def timed(job: Callable[..., _T], *arguments: Any) -> tuple[_T, float]:
    """The result of a job, and the processor seconds that this process took for it."""
    began = time.process_time()
    result = job(*arguments)
    return result, time.process_time() - began


def timed_on(device: Any, job: Callable[..., _T], *arguments: Any) -> tuple[_T, float]:
    """The result of a job, and its seconds: of the processor, or of the wall on a GPU."""
    if device.type != "cuda":
        return timed(job, *arguments)
    import torch

    began = time.perf_counter()
    result = job(*arguments)
    torch.cuda.synchronize(device)
    return result, time.perf_counter() - began


def processor_seconds(pid: int, children: bool = False) -> float:
    """User and system time of a process so far, perhaps with children that it has waited for;
    raises `OSError`."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if children else 13])) / os.sysconf("SC_CLK_TCK")


class Memory(NamedTuple):
    """Memory of one process, in MiB."""

    resident: float
    """RSS: pages in memory, those shared with other processes included."""
    unshared: float
    """USS: pages of this process alone; its end frees them."""


def memory_of(pid: int) -> Memory:
    """Raises `OSError` if there is no such process."""
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        sizes[name.rstrip(":")] = int(size) * 1024
    unshared = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return Memory(sizes["Rss"] / 2**20, unshared / 2**20)


def load_average() -> float:
    """Average number of runnable processes in the last minute.

    Above about 0.5 the machine was not quiet, and times of several processes mean little.
    """
    return round(os.getloadavg()[0], 2)
