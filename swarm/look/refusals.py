"""What each failed check means for the contributor, and what to do: `swarm why`.

docs/troubleshooting.md has the same words. Names of checks are those in verdicts."""

from dataclasses import dataclass

from swarm.data import beside


@dataclass(frozen=True)
class Refusal:
    """The explanation of one failed check."""

    means: str
    do: str


REFUSALS = beside(__file__, dict[str, Refusal])
"""By the check's name, from `refusals.toml`."""
UNKNOWN = Refusal("this version of Swarm does not know the check", "update Swarm")
