"""The peers of a demo."""

from __future__ import annotations

from pathlib import Path

from swarm.app.local_peers import LocalPeer, free_ports
from swarm.identity import load_or_create


def cast(inference_peers: int) -> list[tuple[str, str]]:
    """(name, role) of every peer of a demo."""
    return [
        ("bootstrap", "bootstrap"),
        ("relay-1", "relay"),
        ("relay-2", "relay"),
        ("trainer", "trainer"),
        ("validator", "validator"),
        *((f"inference-{index + 1}", "inference") for index in range(inference_peers)),
    ]


def make_peers(folder: Path, inference_peers: int) -> list[LocalPeer]:
    roles = cast(inference_peers)
    ports = free_ports(2 * len(roles))
    return [
        LocalPeer(
            name=name,
            role=role,
            identity=load_or_create(folder / "peers" / name / "identity.key"),
            home=folder / "peers" / name,
            port=ports[2 * index],
            bulk_port=ports[2 * index + 1],
        )
        for index, (name, role) in enumerate(roles)
    ]
