"""Argparse readers of benchmarks' options, which refuse bad values with one sentence before any
work."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

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
