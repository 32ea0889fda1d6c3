"""How repeated measurements are told: the median, and how far they spread; never the best alone."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence


def spread(name: str, values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """`name`: the median of the values; `name`_least and `name`_most: how far they spread."""
    told = {"": statistics.median(values), "_least": min(values), "_most": max(values)}
    return {name + suffix: round(value, digits) for suffix, value in told.items()}


def load_average() -> float:
    """Processes that wanted to run in the last minute: above 0.5 or so the machine was not quiet,
    and times of several processes say little."""
    return round(os.getloadavg()[0], 2)
