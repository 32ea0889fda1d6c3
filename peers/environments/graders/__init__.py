"""Graders by name: what compares a completion's text with the answer of a task.

Those that need a foreign library call it in killable processes (`peers.environments.graders.pool`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from peers.environments.graders.base import Grader, zero
from swarm.errors import UserError
from swarm.terminal.tables import struct_from_mapping

GRADERS = {
    "exact": "plain:Exact",
    "number": "plain:Number",
    "math": "math:Math",
    "code": "code:Code",
    "reasoning-gym": "reasoning_gym:ReasoningGym",
}

__all__ = ["GRADERS", "Grader", "make_grader", "zero"]


def make_grader(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    timeout_seconds: float | None = None,
    max_parallel: int | None = None,
) -> Grader:
    """The grader `name`; the limits replace its own. Raises `UserError`."""
    if name not in GRADERS:
        raise UserError(f"grader {name!r} is unknown; there are: {', '.join(sorted(GRADERS))}")
    module, _, kind = GRADERS[name].partition(":")
    made: type[Grader] = getattr(import_module(f"{__name__}.{module}"), kind)
    where = f"grader {name!r}: options"
    grader = made(struct_from_mapping(made.Options, dict(options or {}), where))
    for field, value in (("timeout_seconds", timeout_seconds), ("max_parallel", max_parallel)):
        if value is not None:
            if not value > 0:
                raise UserError(f"grader {name!r}: {field} is {value}; it must be positive")
            setattr(grader, field, value)
    return grader
