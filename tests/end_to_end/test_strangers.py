"""Strangers attack every role with the whole catalogue of attacks, on real processes, during a
run."""

from __future__ import annotations

import os
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from swarm.transport import limits
from swarm.wire.identity import Identity
from tests.commands.harness import bootstrap_peer
from tests.end_to_end.harness import (
    START_SECONDS,
    STEP_SECONDS,
    Peer,
    processes_with,
    run_as_attacker,
    swarm,
    yield_processor,
)
from tests.transport import attacks
from tests.transport.hostile import connected

ROLES = ("bootstrap", "relay", "trainer", "validator", "inference-1")
VICTIMS = ("trainer", "validator", "inference-1")
"""Bootstrap peers, relays and observers run a part of their network code."""
MALLORY, HONEST = Identity(bytes([66]) * 32), Identity(bytes([67]) * 32)
GROWTH_BYTES_MAX = 96 << 20
"""Largest allowed growth of memory: the bound of unread bytes (64 MiB), and 32 MiB."""

UNDISTURBED_SECONDS = 6.0
"""Time without attacks before each attack, which shows what a step costs the victim."""

COST_PER_ATTACKER_SECOND_MAX = 4.0
"""Most processor seconds that a stranger's second may cost a peer; 1.5 to 2 were measured."""

NOISE_SHARE = 0.25
"""How much the cost of a victim's own work varies from one period to the next."""


def processor_seconds(peer: Peer) -> float:
    """Return the processor seconds that a peer and its children have taken."""
    ticks = 0
    for pid in (peer.pid, *peer.children().values()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of one process."""
    fields = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024


def give_cores(victim: Peer) -> None:
    """Give the victim the last core and the rest of the swarm the first.

    The victim runs as on a machine of its own. The attacker, this process, gets the CPU time that
    the victim leaves.
    """
    cores = sorted(os.sched_getaffinity(0))
    its_own = {victim.pid, *victim.children().values()}
    for pid in processes_with("swarm.peer") | processes_with("swarm.world"):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores[-1:] if pid in its_own else cores[:1])


async def strike(peer: Peer, source: str) -> list[str]:
    """Run all attacks in turn; return the protocols that the peer serves."""
    protocols = await attacks.served_protocols(peer.multiaddr, MALLORY)
    for stage, group in attacks.CATALOGUE.items():
        for which in group:
            await attacks.attack(peer.multiaddr, stage, which, MALLORY, protocols, source)
            assert peer.status.value is None, f"{peer.name} ended after {stage}: {which}"
    return protocols


@pytest.mark.long
def test_no_role_is_harmed_by_strangers(tmp_path: Path, base: Path, fork_server: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, base, fork_server, names=ROLES, steps=100_000) as peers:
            await peers.start()
            trainer = peers["trainer"]
            await trainer.says("trainer.step_trained", step=1, seconds=START_SECONDS + STEP_SECONDS)
            yield_processor()

            def trained() -> int:
                return len(trainer.heard("trainer.step_trained"))

            for number, name in enumerate(VICTIMS):
                peer, source = peers[name], f"127.0.{number + 1}.1"
                give_cores(peer)
                steps, spent = trained(), processor_seconds(peer)
                await trio.sleep(UNDISTURBED_SECONDS)
                undisturbed = (trained() - steps) / UNDISTURBED_SECONDS
                idle = (processor_seconds(peer) - spent) / UNDISTURBED_SECONDS
                steps, before = trained(), resident_bytes(peer.pid)
                peak, began, spent = before, trio.current_time(), processor_seconds(peer)
                attacker = time.thread_time()

                async def watch(peer: Peer = peer) -> None:
                    nonlocal peak
                    while True:
                        peak = max(peak, resident_bytes(peer.pid))
                        await trio.sleep(0.1)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(watch)
                    protocols = await strike(peer, source)
                    sent = 0
                    for protocol in protocols:
                        sent += await attacks.flood(peer.multiaddr, MALLORY, protocol, source)
                    nursery.cancel_scope.cancel()
                seconds = trio.current_time() - began
                attacker = (time.thread_time() - attacker) / seconds
                pace = (trained() - steps) / seconds
                attacked = (processor_seconds(peer) - spent) / seconds
                cost = attacked - idle * pace / undisturbed
                with trio.fail_after(10):
                    assert await attacks.served_protocols(peer.multiaddr, HONEST) == protocols
                print(
                    f"{name}: {len(protocols)} protocols, {sent >> 20} MiB sent, resident "
                    f"{before >> 20} to at most {peak >> 20} MiB, {60 * pace:.0f} steps a minute, "
                    f"{pace / undisturbed:.2f} of the pace without; strangers cost {cost:.2f} of a "
                    f"core: {attacked:.2f} in place of {idle:.2f}, and the attacker {attacker:.2f}"
                )
                assert cost <= COST_PER_ATTACKER_SECOND_MAX * attacker + NOISE_SHARE * idle
                assert peak - before <= GROWTH_BYTES_MAX
            reached = trained()
            await trainer.says("trainer.step_trained", step=reached + 2, seconds=STEP_SECONDS)
            for peer in peers.peers.values():
                assert peer.status.value is None
                assert not any("Traceback" in line for line in peer.complaints), peer.complaints

    run_as_attacker(main)


@pytest.mark.slow
def test_more_strangers_than_there_is_room_for_shut_nobody_out(tmp_path: Path) -> None:
    """Connect more strangers than the number from 18 addresses that once shut newcomers out."""

    async def main(address: str) -> None:
        async with AsyncExitStack() as stack:
            for number in range(limits.CONNECTIONS_OF_STRANGERS_MAX + 60):
                source = f"127.0.{1 + number % 18}.1"
                key = Identity(number.to_bytes(32, "big"))
                await stack.enter_async_context(connected(address, key, source))
            began = trio.current_time()
            with trio.fail_after(10):
                assert await attacks.served_protocols(address, HONEST)
            print(f"a newcomer was served after {trio.current_time() - began:.2f} s")

    with bootstrap_peer(tmp_path) as address:
        trio.run(main, address)
