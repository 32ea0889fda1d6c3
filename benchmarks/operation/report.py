"""What every figure is reported with: date, commit, machine, and the spread of repeated values."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch

from benchmarks.spread import load_average
from peers.engines.device import title_of


class Spread(msgspec.Struct, frozen=True):
    """Repeated measurements of one quantity."""

    median: float
    least: float
    most: float
    count: int


def spread_of(values: Iterable[float], digits: int = 2) -> Spread:
    """Summarise at least one value."""
    all_values = list(values)
    return Spread(
        median=round(statistics.median(all_values), digits),
        least=round(min(all_values), digits),
        most=round(max(all_values), digits),
        count=len(all_values),
    )


class Machine(msgspec.Struct, frozen=True):
    """The hardware of a measurement, and how busy it was."""

    processor: str
    cores: int
    memory_gb: float
    load: float
    """Runnable processes in the minute before; see `load_average`."""


class Report(msgspec.Struct, frozen=True):
    """One figure."""

    figure: str
    date: str
    commit: str
    machine: Machine
    seconds: float
    """Duration of the measurement."""
    result: msgspec.Struct


def this_machine() -> Machine:
    return Machine(
        processor=title_of(torch.device("cpu")),
        cores=os.cpu_count() or 1,
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        load=load_average(),
    )


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def commit() -> str:
    """Short id of the checked-out commit; empty outside a repository."""
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return told.stdout.strip()
