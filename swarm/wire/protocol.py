"""Version of the protocol: what this build speaks, and what a run may ask of its peers.

`docs/decisions/0039-protocol-versions.md` says when a change needs a new version."""

from typing import Annotated

from msgspec import Meta

PROTOCOL_VERSION = 3
"""Protocol version of this build. 1: builds that announce none. 2: peers announce theirs, and a run
says which one it needs. 3: records of rounds rate strangers, who weigh by it in the merge."""

PROTOCOL_OLDEST = 1
"""Oldest version whose peers this build works with."""

UPGRADE = "pip install -U swarm-rl"
"""What a peer's operator types."""

ProtocolVersion = Annotated[int, Meta(ge=1, le=1_000_000)]


def protocol_problem(run: str, needs: int) -> str | None:
    """One sentence on why this build cannot take part in a run that needs more; None if it can."""
    if needs > PROTOCOL_VERSION:
        return (
            f"run {run} needs protocol version {needs}, and this build speaks {PROTOCOL_VERSION}: "
            f"upgrade it with {UPGRADE}"
        )
    if needs < PROTOCOL_OLDEST:
        return (
            f"run {run} admits peers of protocol version {needs}, and this build works with "
            f"{PROTOCOL_OLDEST} and newer: install an older Swarm, or ask the run's owner to raise "
            f"needs to {PROTOCOL_OLDEST}"
        )
    return None
