"""How peers are connected to the simulated network, and how far apart they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A peer's access to the network."""

    region: str = "europe-west"
    uplink_bytes_per_second: float = 125e6
    downlink_bytes_per_second: float = 125e6
    reachability: str = "public"
    """One of `REACHABILITIES`."""


REACHABILITIES = ("public", "cone", "symmetric", "relay-only")
"""Who can be reached, and how. Anybody can dial the public. The others are behind a NAT and are
reached over a relay, after which a direct way is tried: it is found between a peer behind a cone
NAT and any but the relay-only, and between one behind a symmetric NAT and the public; a
relay-only peer's connections stay with their relay."""


@dataclass(frozen=True)
class Weather:
    """What all links have in common."""

    jitter: float = 0.1
    """Latency is up to this part longer, evenly distributed."""
    loss: float = 0.001
    """Part of the packets that is lost."""
    local_seconds: float = 0.002
    """One-way latency within a region."""


REGIONS = ("us-east", "us-west", "europe-west", "europe-east", "asia-east", "asia-south", "brazil")

LATENCY_SECONDS_RANGE = (0.02, 0.15)
"""One-way latency between two regions, drawn by seed for each pair."""


def can_punch(a: Line, b: Line) -> bool:
    """Whether a direct way is found between two peers behind NATs."""
    kinds = {a.reachability, b.reachability}
    return "relay-only" not in kinds and ("cone" in kinds or "public" in kinds)
