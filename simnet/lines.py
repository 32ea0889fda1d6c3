"""Peers' lines to the simulated network, and the properties that all links share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    region: str = "europe-west"
    uplink_bytes_per_second: float = 125e6
    downlink_bytes_per_second: float = 125e6
    reachability: str = "public"
    """One of `REACHABILITIES`."""


REACHABILITIES = ("public", "cone", "symmetric", "relay-only")
"""Any peer can dial a public peer; the others, behind a NAT, are reached over a relay. Holes are
then punched from a cone NAT to all but relay-only peers, from a symmetric one to public ones."""


@dataclass(frozen=True)
class Weather:
    """Properties that all links share."""

    jitter: float = 0.1
    """Latency is longer by up to this share, evenly distributed."""
    loss: float = 0.001
    local_seconds: float = 0.002


REGIONS = ("us-east", "us-west", "europe-west", "europe-east", "asia-east", "asia-south", "brazil")

LATENCY_SECONDS_RANGE = (0.02, 0.15)
"""One-way latency between two regions, drawn by seed for each pair."""


def can_punch(a: Line, b: Line) -> bool:
    """Whether hole punching between two peers behind NATs succeeds."""
    kinds = {a.reachability, b.reachability}
    return "relay-only" not in kinds and ("cone" in kinds or "public" in kinds)
