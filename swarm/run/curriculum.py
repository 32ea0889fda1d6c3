"""A step's environments: those of the manifest, at the levels that the step's order names.

A worker, a validator and an environment peer read the same signed order, so they draw the same
tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swarm.wire.manifest import EnvironmentReference, RunManifest
from swarm.wire.messages import StepOrder


def environments_of(manifest: RunManifest, order: StepOrder) -> list[EnvironmentReference]:
    """The environments that a step draws its tasks from."""
    return at_levels(manifest.environments, order.levels)


def at_levels(
    references: Sequence[EnvironmentReference], levels: Sequence[int]
) -> list[EnvironmentReference]:
    """Environments at their levels; a level that is not given is 0."""
    given = [*levels, *[0] * len(references)]
    return [at_level(each, level) for each, level in zip(references, given, strict=False)]


def at_level(reference: EnvironmentReference, level: int) -> EnvironmentReference:
    """An environment with the weight and the options of a level; the last one counts beyond.

    Its probe hash is that of the manifest's options, so a level with others has none.
    """
    rule = reference.curriculum
    if not rule.levels:
        return reference
    level = min(level, rule.levels - 1)
    weight = rule.weights[level] if rule.weights else reference.weight
    if not rule.values:
        return msgspec.structs.replace(reference, weight=weight)
    return msgspec.structs.replace(
        reference,
        weight=weight,
        options={**reference.options, rule.option: rule.values[level]},
        probe_hash=bytes(32),
    )
