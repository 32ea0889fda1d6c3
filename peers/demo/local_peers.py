"""Peers that run as processes on this machine: ports, settings files and command lines."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarm.wire.identity import Identity


@dataclass
class LocalPeer:
    """One peer on loopback. Its identity and ports stay the same across restarts."""

    name: str
    role: str
    identity: Identity
    home: Path
    port: int
    bulk_port: int
    arguments: list[str] = field(default_factory=list)
    """Command-line arguments beyond role, home and ports."""

    @property
    def multiaddr(self) -> str:
        return f"/ip4/127.0.0.1/tcp/{self.port}/p2p/{self.identity.peer_id}"

    def command(self, restart: bool) -> list[str]:
        resume = ["--resume"] if restart and self.role == "trainer" else []
        return [
            sys.executable,
            "-m",
            "swarm.peer",
            *("--role", self.role),
            *("--home", str(self.home)),
            *("--listen", f"/ip4/127.0.0.1/tcp/{self.port}"),
            *("--bulk-port", str(self.bulk_port)),
            *self.arguments,
            *resume,
            "--json-logs",
        ]


def free_ports(count: int) -> list[int]:
    """Find distinct loopback TCP ports that are free at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


Setting = str | int | float | bool | Sequence[str]


def write_config(path: Path, role: str, settings: Mapping[str, Setting]) -> None:
    """Write a peer's TOML settings: one role's table."""
    # JSON's scalars and lists are valid TOML.
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    path.write_text(f"[{role}]\n" + "\n".join(lines) + "\n", encoding="utf-8")
