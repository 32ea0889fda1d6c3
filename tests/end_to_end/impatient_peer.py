"""A peer whose waits for others are about a fifth as long as usual: `… <peer's flags>`.

Its code is unchanged. All peers of a swarm must be impatient, else a heartbeat comes too late.
"""

from __future__ import annotations

import sys

import typer

import swarm.node.run_node  # noqa: F401  (imports all modules with these waits)
from swarm.commands.peer import peer

WAITS = {
    "ADMISSION_LEASE_SECONDS": 12.0,
    "CONNECTION_PING_SECONDS": 3.0,
    "CONNECTION_PONG_SECONDS": 2.0,
    "CREDENTIAL_SECONDS": 5.0,
    "GONE_SECONDS": 12.0,
    "HEARTBEAT_SECONDS": 2.0,
    "LINE_SECONDS": 3.0,
    "SUSPECTED_SECONDS": 6.0,
}

if __name__ == "__main__":
    ours = [module for name, module in sys.modules.items() if name.startswith("swarm.")]
    for module in ours:
        for name in WAITS.keys() & vars(module).keys():
            setattr(module, name, WAITS[name])
    typer.run(peer)
