"""Every peer is asked to leave by SIGTERM, and loses nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import trio

from swarm.look.health import HEALTH
from tests.deploy.files import grace_seconds
from tests.end_to_end.harness import START_SECONDS, STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts, check_nobody_was_wronged

NAMES = ["bootstrap", "relay", "trainer", "validator", "inference-1"]
GRACE_SECONDS = min(grace_seconds().values())


@pytest.mark.slow
def test_every_peer_leaves_within_the_grace_period(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        leaving = ["inference-1", "validator", "relay", "trainer", "bootstrap"]
        steps = len(leaving) + 2
        settings = {"trainer": {"starved_seconds": 20.0}}  # rollouts may be lost with a peer
        async with swarm(
            tmp_path, base, fork_server, names=NAMES, steps=steps, settings=settings
        ) as peers:
            await peers.start()
            trainer = peers["trainer"]
            for step, name in enumerate(leaving, 1):
                seconds = START_SECONDS + STEP_SECONDS  # a peer may have to start again first
                await trainer.says("trainer.checkpoint_published", step=step, seconds=seconds)
                peer = peers[name]
                told = json.loads((peer.home / HEALTH).read_bytes())
                assert told["roles"] == [peer.role]  # it may have become ready since it was told
                since = len(peer.events)
                peer.send(signal.SIGTERM)
                assert await peer.ended(GRACE_SECONDS) == 0, peer.complaints
                assert not peer.left_behind and not (peer.home / HEALTH).exists()
                if peer.role == "inference":
                    (left,) = peer.heard("inference.leaving", since)
                    assert "abandoned" not in left["reason"]
                peers.restart(name)
            await peers.complete(steps * STEP_SECONDS)
            check_nobody_was_wronged(check_accounts(peers))

    trio.run(main)
