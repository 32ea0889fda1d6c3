"""Reporting of repeated measurements: the median and the spread, never the best value alone."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence


def spread(name: str, values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """`name`: the median of the values; `name`_least and `name`_most: their minimum and maximum."""
    told = {"": statistics.median(values), "_least": min(values), "_most": max(values)}
    return {name + suffix: round(value, digits) for suffix, value in told.items()}


def load_average() -> float:
    """Average number of runnable processes in the last minute.

    Above about 0.5 the machine was not quiet, and times of several processes mean little.
    """
    return round(os.getloadavg()[0], 2)
