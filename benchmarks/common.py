"""What benchmarks share: readers of their options, and the reporting of repeated measurements.

Bad options are refused with one sentence before any work. Of repeated values the median is reported
with the least and the most, never the best alone.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

_T = TypeVar("_T")


def at_least(least: int) -> Callable[[str], int]:
    """Reader of a whole number of at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return read


def number_where(allowed: Callable[[float], bool], range_: str) -> Callable[[str], float]:
    """Reader of a number in a range; `range_` describes it, like "from 0 to below 1"."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r} is no number {range_}")
        return value

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


def load_average() -> float:
    """Average number of runnable processes in the last minute.

    Above about 0.5 the machine was not quiet, and times of several processes mean little.
    """
    return round(os.getloadavg()[0], 2)
