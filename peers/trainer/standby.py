"""A standby keeps the run's newest policy until it takes the trainer's place."""

from __future__ import annotations

import trio

from swarm.node.run_node import RunNode


async def stand_by(peer: RunNode) -> bool:
    """Follow the run's policies until its manifest names this peer as a trainer.

    Returns False if the run has ended before.
    """
    peer.status.doing = "standing by"
    peer.node.events.emit("standby.standing_by")
    async with trio.open_nursery() as nursery:

        async def end() -> None:
            await peer.run_over()
            nursery.cancel_scope.cancel()

        nursery.start_soon(peer.policies.follow)
        nursery.start_soon(end)
        while not peer.run.manifest.is_trainer(peer.peer_id):
            await peer.versions.changed.wait_change()
        nursery.cancel_scope.cancel()
    return peer.run.manifest.is_trainer(peer.peer_id)
