"""What a trainer holds in memory, by part, before anything is loaded."""

from collections.abc import Sequence
from typing import Literal

import msgspec

Phase = Literal["always", "scoring", "asking", "training", "stepping", "publishing"]
"""When a part exists: `scoring` under older policies, `asking` the teacher, `training` passes with
gradients, the optimiser's `stepping`, `publishing` a policy."""


class MemoryPart(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one rank holds for one purpose."""

    name: str
    memory: Literal["device", "host"]
    phase: Phase
    bytes: int


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's memory, by part, and whether the machine has it. A limit of 0 is unknown."""

    parameters: int
    """Of the whole policy; tied ones count once."""
    ranks: int
    tokens: int
    """Tokens in one forward pass."""
    parts: list[MemoryPart]
    device_bytes: int = 0
    """Of one rank, in its fullest phase."""
    device_limit: int = 0
    host_bytes: int = 0
    """Of all ranks of one machine, in their fullest phase."""
    host_limit: int = 0
    problem: str = ""
    """One sentence that says what does not fit, by how much, and what would; empty: it fits."""


def fullest(parts: Sequence[MemoryPart], memory: str) -> list[MemoryPart]:
    """The parts of one rank's device or host memory in the fullest phase, largest first."""
    phases: dict[str, list[MemoryPart]] = {}
    for part in parts:
        if part.memory == memory:
            phases.setdefault(part.phase, []).append(part)
    always = phases.pop("always", [])
    most = max(phases.values(), key=total, default=[])
    return sorted([*always, *most], key=lambda part: -part.bytes)


def total(parts: Sequence[MemoryPart]) -> int:
    """Bytes of all parts."""
    return sum(part.bytes for part in parts)
