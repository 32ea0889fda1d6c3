"""The protocol version that a run's manifest needs, by the features that it uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from swarm.errors import UserError
from swarm.wire.manifest import RunManifest
from swarm.wire.protocol import PROTOCOL_VERSION


class Feature(NamedTuple):
    """A term of a run that a peer must understand to take part."""

    version: int
    """Protocol version that it came with."""
    name: str
    """The manifest's field."""
    used: Callable[[RunManifest], bool]


FEATURES = (
    Feature(2, "adapter", lambda m: m.adapter.rank > 0),
    Feature(2, "sampling.swaps_max", lambda m: m.sampling.swaps_max > 0),
    Feature(2, "thresholds.quantised_weights", lambda m: bool(m.thresholds.quantised_weights)),
    Feature(2, "objective.router_replay", lambda m: m.objective.router_replay),
    Feature(2, "objective.name = synthesis", lambda m: not m.objective.learns),
    Feature(2, "objective.advantage", lambda m: m.objective.advantage != "group"),
    Feature(2, "objective.process", lambda m: m.objective.has_process),
    Feature(
        2,
        "environments.where = served",
        lambda m: any(each.where == "served" for each in m.environments),
    ),
    Feature(
        2,
        "environments.curriculum",
        lambda m: any(each.curriculum.levels > 0 for each in m.environments),
    ),
    Feature(2, "outer", lambda m: m.outer.rounds > 0),
    Feature(2, "standbys", lambda m: bool(m.standbys)),
    Feature(2, "successors", lambda m: bool(m.successors)),
    Feature(2, "values.estimate = continuations", lambda m: m.values.estimate != "group"),
)
"""Features that not every supported build has. A build without one ignores its field, so a peer
would make other rollouts than the run ordered, or train on them otherwise."""


def features_of(manifest: RunManifest) -> list[Feature]:
    """List the features of the table that a manifest uses."""
    return [feature for feature in FEATURES if feature.used(manifest)]


def with_needs(manifest: RunManifest, where: str = "") -> RunManifest:
    """Return the manifest with the least version that its features need, or the owner's if higher.

    `where` names the file in which the owner set `needs`. Raises `UserError` for a version that
    this build does not speak itself.
    """
    if manifest.needs > PROTOCOL_VERSION:
        raise UserError(
            f"{where}: needs is {manifest.needs}, and this build speaks {PROTOCOL_VERSION}; it "
            "can sign no run that it does not understand"
        )
    least = max((feature.version for feature in features_of(manifest)), default=1)
    return msgspec.structs.replace(manifest, needs=max(manifest.needs, least))
