"""Readers of benchmarks' options for argparse: one sentence, before any work, for what makes no
sense."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def at_least(least: int) -> Callable[[str], int]:
    """A whole number."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return read


def number_where(allowed: Callable[[float], bool], range_: str) -> Callable[[str], float]:
    """A number in a range, that is named as in "from 0 to below 1"."""

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
    """At least so many, with commas between them."""

    def read(text: str) -> list[_T]:
        found = [read_one(each) for each in text.split(",")]
        if len(found) < least:
            raise argparse.ArgumentTypeError(f"{text!r} names {len(found)}, fewer than {least}")
        return found

    return read
