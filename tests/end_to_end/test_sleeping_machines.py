"""A laptop's lid is closed for longer than anybody waits for it, and opened again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import trio

from tests.end_to_end.harness import STEP_SECONDS, Peer, Swarm, swarm
from tests.end_to_end.ledgers import read_accounts

NAMES = ["bootstrap", "relay", "trainer", "validator", "inference-1", "inference-2"]


async def one_says(peers: list[Peer], since: dict[str, int], remote: str, *names: str) -> None:
    """Wait until one of these peers says one of these of another one."""
    async with trio.open_nursery() as nursery:

        async def wait(peer: Peer, name: str) -> None:
            await peer.says(name, since=since[peer.name], remote=remote)
            nursery.cancel_scope.cancel()

        for peer in peers:
            for name in names:
                nursery.start_soon(wait, peer, name)


async def sleep_and_wake(peers: Swarm, laptop: Peer) -> None:
    """Stop a peer until others call it gone; it must be a member again and deliver more."""
    trusted = [peers["trainer"], peers["validator"]]
    remote = str(laptop.identity.peer_id)
    begun = {each.name: len(each.events) for each in [*trusted, laptop]}
    laptop.send(signal.SIGSTOP)
    await one_says(trusted, begun, remote, "membership.peer_suspected")
    await one_says(trusted, begun, remote, "membership.peer_gone")
    gone = {each.name: len(each.events) for each in trusted}
    laptop.send(signal.SIGCONT)
    # A trusted peer hears it again, or another one, which did not have it, admits it.
    await one_says(trusted, gone, remote, "membership.peer_returned", "membership.peer_admitted")
    loaded = await laptop.says("inference.policy_loaded", since=len(laptop.events))
    since = laptop.events.index(loaded)
    await laptop.says("inference.receipt", since=since, outcome="accepted")


@pytest.mark.slow
def test_a_machine_that_sleeps_comes_back_twice(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, base, fork_server, names=NAMES, steps=1000) as peers:
            for peer in peers.peers.values():
                python, dash_m, _, *flags = peer.command
                peer.command = [python, dash_m, "tests.end_to_end.impatient_peer", *flags]
            await peers.start()
            laptop = peers["inference-1"]
            await laptop.says("inference.receipt", seconds=2 * STEP_SECONDS, outcome="accepted")
            for _ in range(2):
                await sleep_and_wake(peers, laptop)
            assert not laptop.heard("inference.receipt", outcome="refused")
            assert not read_accounts(peers).evicted()

    trio.run(main)
