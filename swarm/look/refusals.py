"""What each failed check means for the contributor, and what to do: `swarm why`.

docs/troubleshooting.md has the same words. Names of checks are those in verdicts.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple


class Refusal(NamedTuple):
    """The explanation of one failed check."""

    means: str
    do: str


REFUSALS: dict[str, Refusal] = {
    name: Refusal(**told)
    for name, told in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}
"""By the check's name, from `refusals.toml`."""
UNKNOWN = Refusal("this version of Swarm does not know the check", "update Swarm")
