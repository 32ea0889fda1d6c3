"""The evidence against a worker is read from the logs: alike after a restart and at others."""

from __future__ import annotations

import shutil
from pathlib import Path

import trio

from peers.validator.eviction import Records
from swarm.wire.identity import Identity
from swarm.wire.messages import Evidence, Reinstatement
from tests.ledger.harness import ALICE, BOB, OWNER, WORKER, Peer, Swarm, sealed, verdict_at

CHEATED = Evidence(tokens=100, mismatches=9, sampler=[9000], policy=[0], text=[0], selection=[0])


def capital(peer: Peer) -> float:
    """A fresh reading of the evidence that one trusted peer holds against the worker."""
    records = Records(peer.run_node.run, peer.trusted)
    return records.standing(WORKER.peer_id).log_capital


async def test_restarts_and_other_validators_find_the_same_evidence(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        read = Records(alice.run_node.run, alice.trusted)
        for number in range(3):
            await alice.trusted.append_verdict(verdict_at(number, evidence=CHEATED))
            assert read.standing(WORKER.peer_id).log_capital == capital(alice)
        await bob.trusted.append_verdict(verdict_at(3, evidence=CHEATED))
        await bob.trusted.append_verdict(verdict_at(4))  # not recomputed
        found = capital(alice)
        await alice.until(lambda: capital(alice) > found, "bob's evidence arrives")
        await bob.until(lambda: capital(bob) == capital(alice), "alice's arrives")
        found = capital(alice)
        assert read.standing(WORKER.peer_id).log_capital == found > 30
    async with swarm.peer(ALICE) as alice:
        assert capital(alice) == found


async def test_evidence_of_workers_that_went_is_read_again_when_they_return(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice:
        read = Records(alice.run_node.run, alice.trusted, read_max=2)
        await alice.trusted.append_verdict(verdict_at(0, evidence=CHEATED))
        found = read.standing(WORKER.peer_id)
        for number in range(5):
            read.standing(Identity(bytes([number]) * 32).peer_id)
        assert len(read._read) == 2 and WORKER.peer_id not in read._read
        assert read.standing(WORKER.peer_id) == found


async def test_a_reinstatement_clears_earlier_evidence(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        read = Records(alice.run_node.run, alice.trusted)
        await alice.trusted.append_verdict(verdict_at(0, evidence=CHEATED))
        await bob.until(lambda: capital(bob) > 0, "alice's evidence arrives")
        await alice.trusted.evict(WORKER.peer_id, "its evidence", bytes(32), 0.0, 1e-9)
        await trio.sleep(1)
        pardon = sealed(
            OWNER,
            Reinstatement(peer=WORKER.peer_id, reason="a mistake"),
            swarm.run,
            at=trio.current_time(),
        )
        bob.run_node.gossip.publish(pardon)
        await alice.until(lambda: capital(alice) == 0, "alice clears it")
        await bob.until(lambda: capital(bob) == 0, "bob clears it")
        assert read.standing(WORKER.peer_id).log_capital == 0
        await alice.trusted.append_verdict(verdict_at(1, evidence=CHEATED))
        found = read.standing(WORKER.peer_id).log_capital
        assert found == capital(alice) > 0
        await bob.until(lambda: capital(bob) == found, "bob mirrors it")
    shutil.rmtree(tmp_path / ALICE.peer_id)
    async with swarm.peer(BOB) as bob, swarm.peer(ALICE) as alice:
        await alice.until(lambda: capital(alice) == found, "its disk was lost and restored")
        assert capital(bob) == found
