"""Fetching a run's newest policy from its peers into a folder."""

import math
from collections.abc import Sequence
from pathlib import Path

import trio

from swarm.errors import DeadlineError, UserError
from swarm.node.local import visit
from swarm.node.run_node import RunNode
from swarm.shardcast.held import Held
from swarm.shardcast.mirror import folder


async def from_peers(
    out: Path,
    bootstrap: Sequence[str] | None,
    *,
    run: str | None = None,
    digest: bytes | None = None,
    deadline: float,
    progress: folder.Progress = lambda done, total: None,
) -> Held:
    """Fetch the newest policy of a run into the folder `out`, as an observer of the run.

    An adapter's base is fetched into a folder in `out`. `deadline` is in seconds. Raises as
    `Policies.get`, and `UserError` if `digest` is given and not the policy's manifest's."""
    folder.check_out(out)
    with folder.writing(out) as disk:
        held, base = await _newest_policy(
            folder.partial_of(out), bootstrap, run, digest, deadline, progress
        )
        # The deadline limits the network only; moving the complete files may take longer.
        await folder.move_out(disk, held, out, base)
        return held


async def _newest_policy(
    home: Path,
    bootstrap: Sequence[str] | None,
    run: str | None,
    digest: bytes | None,
    deadline: float,
    progress: folder.Progress,
) -> tuple[Held, Held | None]:
    """Fetch the newest policy of a run into the checkpoint store of a peer at `home`.

    Returns its base, too, if it is an adapter."""
    held: Held | None = None
    base: Held | None = None
    with trio.move_on_after(deadline) as scope:
        async with visit(bootstrap, run, home=home) as (node, found):
            peer = RunNode(node, found)
            peer.store.watch(folder.watcher(progress))
            async with peer.joined():
                await peer.checkpoint.wait_until(lambda envelope: envelope is not None)
                checkpoint = peer.newest_checkpoint()
                assert checkpoint is not None
                if digest is not None and checkpoint.reference.digest != digest:
                    raise UserError(
                        f"the newest policy of {found.id} is {checkpoint.step} with manifest "
                        f"{checkpoint.reference.digest.hex()[:12]}…, not --digest "
                        f"{digest.hex()[:12]}…; leave --digest out to take that one, or fetch "
                        "the other from a mirror"
                    )
                # The fetch has its own deadline, and its error names the peers it waited for.
                left = math.ceil(scope.deadline - trio.current_time())
                scope.deadline = math.inf
                await peer.policies.get(checkpoint.reference, deadline_seconds=max(1, left))
                held = peer.store.held((checkpoint.lineage, checkpoint.step))
                base = peer.store.base_of(held) if held is not None else None
    if held is None:
        raise DeadlineError(
            f"no policy of the run was announced within {deadline:g} s; its trainer may be down"
        )
    return held, base
