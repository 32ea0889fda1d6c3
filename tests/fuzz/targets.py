"""All targets by name."""

from __future__ import annotations

from tests.fuzz import files, messages, streams
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target for target in [*messages.TARGETS, *streams.TARGETS, *files.TARGETS]
}
