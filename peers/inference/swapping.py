"""Offers of newer policies to an engine that generates, where the run allows swaps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from swarm.errors import SwarmError
from swarm.jobs import Load
from swarm.jobs.inference import InferenceService, Swap
from swarm.messages import CheckpointReference
from swarm.node.run_node import RunNode

PINNED = 2
"""Policies offered last that stay on the disk: the engine may be reading either."""


async def offer_newer(
    peer: RunNode, engine: InferenceService, swappable: Callable[[], CheckpointReference | None]
) -> None:
    """Offer the engine each newer policy of the lineage as it arrives, until cancelled.

    `swappable`: the policy that the engine holds; None if it holds none or may not swap.
    """
    offered: CheckpointReference | None = None
    pinned: deque[tuple[int, int]] = deque()

    def newer() -> CheckpointReference | None:
        held, found = swappable(), peer.newest_checkpoint()
        if held is None or found is None or found.lineage != held.lineage:
            return None
        known = {held.step, offered.step if offered and offered.lineage == held.lineage else -1}
        return found.reference if found.step > max(known) else None

    try:
        while True:
            await peer.checkpoint.wait_until(lambda _: newer() is not None)
            reference = newer()
            assert reference is not None
            offered = reference
            try:
                folder = await peer.policies.get(reference)
            except SwarmError:  # reported by `Policies.follow`, which fetches it as well
                continue
            pinned.append((reference.lineage, reference.step))
            peer.store.pin(pinned[-1])
            if len(pinned) > PINNED:
                peer.store.unpin(pinned.popleft())
            local = str(peer.node.disk.local_path(folder))
            await engine.swap(Swap(load=Load(policy=reference, folder=local)))
    finally:
        for key in pinned:
            peer.store.unpin(key)
