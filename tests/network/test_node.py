"""A peer of a run as `swarm.node` puts it together, over the memory network."""

from __future__ import annotations

from pathlib import Path

import msgspec
import trio

from swarm import defaults
from swarm.messages import RunManifest
from tests.ledger.harness import OWNER, TRAINER, WORKER, Peer, Swarm, in_virtual_time, sealed


async def publish(peer: Peer, step: int) -> bytes:
    """A small checkpoint of this peer; its manifest's digest."""
    disk = peer.node.disk
    await disk.write("made/model.safetensors", bytes([step]) * defaults.PIECE_BYTES_MIN)
    held, _ = await peer.run_node.store.publish("made", 0, step)
    return held.digest


def test_a_peer_whose_run_changes_its_mode_says_what_it_passes_on(tmp_path: Path) -> None:
    async def main() -> None:
        run = Swarm(tmp_path)
        async with run.peer(TRAINER) as trainer, run.peer(WORKER) as worker:
            have = trainer.run_node.have
            digest = await publish(worker, 0)

            def is_claimed() -> bool:
                return have.claim(WORKER.peer_id, digest) is not None

            await trainer.until(is_claimed, "an open run's peer says what it has")
            message = run.manifest.message
            assert isinstance(message, RunManifest)
            for version, mode in ((2, "relay-only"), (3, "open"), (4, "open"), (5, "relay-only")):
                changed = msgspec.structs.replace(message, version=version, broadcast_mode=mode)
                envelope = sealed(OWNER, changed, worker.run_node.run.id, sequence=version)
                trainer.run_node.gossip.publish(envelope)
                await trio.sleep(5)
                assert worker.run_node.run.manifest.version == version
                assert is_claimed() == (mode == "open"), mode

    in_virtual_time(main)
