"""Offers of newer policies to an engine that generates, where the run allows swaps."""

from collections.abc import Callable
from contextlib import ExitStack

from swarm.errors import SwarmError
from swarm.jobs import Load
from swarm.jobs.inference import InferenceService, Swap
from swarm.node.run_node import RunNode
from swarm.wire.messages import CheckpointReference


async def offer_newer(
    peer: RunNode, engine: InferenceService, swappable: Callable[[], CheckpointReference | None]
) -> None:
    """Offer newer policies, until cancelled. `swappable`: the engine's; None: none, or no swaps."""
    offered: CheckpointReference | None = None

    def newer() -> CheckpointReference | None:
        held, found = swappable(), peer.newest_checkpoint()
        if held is None or found is None or found.lineage != held.lineage:
            return None
        known = {held.step, offered.step if offered and offered.lineage == held.lineage else -1}
        return found.reference if found.step > max(known) else None

    with ExitStack() as read:  # the policy offered last, and the one that the engine reads
        while True:
            await peer.checkpoint.wait_until(lambda _: newer() is not None)
            reference = newer()
            assert reference is not None
            offered = reference
            with ExitStack() as pinned:
                pinned.enter_context(peer.store.pinned(reference))
                try:
                    folder = await peer.policies.get(reference)
                except SwarmError:  # reported by `Policies.follow`, which fetches it as well
                    continue
                local = str(peer.node.disk.local_path(folder))
                answer = await engine.swap(Swap(load=Load(policy=reference, folder=local)))
                if answer.reading is not None:
                    pinned.enter_context(peer.store.pinned(answer.reading))
                read.close()
                read.push(pinned.pop_all())
