"""The evidence of the exact checks: a submission's file, and the content its seed determines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from peers.environments import Renderer
from peers.environments.collection import GroupTask
from peers.environments.episodes import EpisodeLimits
from peers.validator.parsing import Contents
from swarm.rollouts.rollouts import Rollouts


@dataclass
class Inspection:
    """One submission under inspection, independent of this machine and of the time."""

    read: Callable[[], Contents]
    """Reads the hostile file; raises `BadSubmission`."""
    header: Mapping[str, Any]
    """Expected header fields, from the announcement, the step order and the manifest."""
    groups: Sequence[GroupTask]
    prompts: Sequence[Sequence[int]]
    """[groups][tokens] Token ids of each group's prompt."""
    group_size: int
    renderer: Renderer
    vocabulary: int
    limits: EpisodeLimits

    @cached_property
    def contents(self) -> Contents:
        """Header and rollouts, read on first use; raises `BadSubmission`."""
        return self.read()

    @property
    def rollouts(self) -> Rollouts:
        return self.contents.rollouts
