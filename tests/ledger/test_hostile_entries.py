"""Entries that a malicious trusted peer may write into its own log."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from peers.validator.eviction import Records
from swarm.ledger.entries import (
    Carried,
    Entry,
    Evicted,
    Redeemed,
    Reinstated,
    Sealed,
    SealedCapital,
    SealedLog,
    SealedWorker,
    encode,
)
from swarm.run.invites import invite_in, make_invite
from swarm.wire.identity import Identity
from swarm.wire.messages import Eviction, Invite, Reinstatement
from tests.ledger.harness import (
    ALICE,
    BOB,
    OWNER,
    TRAINER,
    WORKER,
    Peer,
    Swarm,
    identity,
    sealed,
    verdict_at,
)
from tests.ledger.test_evidence import CHEATED, capital
from tests.ledger.test_state import judged, state
from tests.worlds import WALL

ANOTHER = identity(77)
COVERED = SealedLog(owner=BOB.peer_id, size=1, root=bytes(32), first=1)
SEALED = Sealed(
    epoch=0, lineage=0, step=0, logs=[COVERED], rules=bytes(32), totals=bytes(32), block=2
)
SEAL = encode(SEALED)


def size_of(peer: Peer, owner: Identity) -> int:
    """Entries of another trusted peer's log that a peer holds."""
    log = peer.trusted.log_of(owner.peer_id)
    assert log is not None
    return log.size()


RUN = "owner/run"


async def test_only_the_owners_reinstatement_clears_evidence(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        await alice.trusted.append_verdict(verdict_at(0, evidence=CHEATED))
        before = capital(alice)
        assert before > 0
        theirs = sealed(OWNER, Reinstatement(peer=ANOTHER.peer_id), swarm.run)
        forged = sealed(BOB, Reinstatement(peer=WORKER.peer_id), swarm.run)
        for raw in (b"nothing", theirs.raw, forged.raw):
            await bob.trusted.append([Reinstated(peer=WORKER.peer_id, envelope=raw)])
        await bob.trusted.append_verdict(verdict_at(1))
        await alice.until(lambda: size_of(alice, BOB) == 4, "bob's log arrives")
        assert capital(alice) == before


async def test_a_reinstatement_that_is_logged_again_clears_nothing_more(tmp_path: Path) -> None:
    """Every trusted peer logs it, and some logs arrive late."""
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        pardon = sealed(OWNER, Reinstatement(peer=WORKER.peer_id), swarm.run)
        entry = Reinstated(peer=WORKER.peer_id, envelope=pardon.raw)
        await alice.trusted.append([entry])
        await alice.trusted.append_verdict(verdict_at(0, evidence=CHEATED))
        before = capital(alice)
        assert before > 0
        await bob.trusted.append([entry])
        await bob.trusted.append_verdict(verdict_at(1))
        await alice.until(lambda: size_of(alice, BOB) == 2, "bob's log arrives")
        assert capital(alice) == before
        records = Records(alice.run_node.run, alice.trusted)
        assert records.standing(WORKER.peer_id).log_capital == before


@pytest.mark.parametrize("of", ["another peer", "another run"])
def test_an_eviction_of_another_voids_nothing(of: str) -> None:
    peer, run = (ANOTHER, RUN) if of == "another peer" else (WORKER, "owner/another")
    envelope = sealed(ALICE, Eviction(peer=peer.peer_id, reason="a fault"), run)
    entries: list[Entry] = [
        judged(0),
        Evicted(peer=WORKER.peer_id, reason="a fault", envelope=envelope.raw),
    ]
    found = state({ALICE.peer_id: entries})
    assert found.totals[WORKER.peer_id].void == 0


def test_a_reinstatement_of_another_restores_nothing() -> None:
    evicted = sealed(ALICE, Eviction(peer=WORKER.peer_id, reason="a fault"), RUN)
    pardon = sealed(OWNER, Reinstatement(peer=ANOTHER.peer_id), RUN, at=5.0)
    entries: list[Entry] = [
        judged(0),
        Evicted(peer=WORKER.peer_id, reason="a fault", envelope=evicted.raw),
        Reinstated(peer=WORKER.peer_id, envelope=pardon.raw),
    ]
    found = state({ALICE.peer_id: entries})
    assert found.totals[WORKER.peer_id].void > 0


async def test_a_proven_fault_and_its_eviction_are_logged_together(tmp_path: Path) -> None:
    """A validator that is killed between the two would never evict."""
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(TRAINER):
        fault = verdict_at(0, outcome="refused", failed="prompts", proven_fault=True)
        await alice.trusted.append_verdict(fault)
    async with swarm.peer(ALICE) as alice:
        await trio.sleep(1)
        assert alice.run_node.run.evicted(WORKER.peer_id) is not None


async def test_only_the_owners_messages_redeem_invites(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    invite, other = (
        invite_in(make_invite(OWNER, swarm.run, wall_time=WALL, lifetime_seconds=60.0))
        for _ in range(2)
    )
    id_, now = invite.expect(Invite).id, invite.body.issued_ms
    forged = invite_in(make_invite(BOB, swarm.run, wall_time=WALL, lifetime_seconds=60.0))
    elsewhere = invite_in(make_invite(OWNER, "x/y", wall_time=WALL, lifetime_seconds=60.0))
    stolen: list[Entry] = [
        Redeemed(invite=id_, peer=ANOTHER.peer_id, redeemed_ms=at, envelope=raw)
        for at, raw in (
            (now, b""), (now, b"nothing"), (now, forged.raw), (now, elsewhere.raw),
            (now, other.raw), (now - 1, invite.raw),
        )
    ]  # fmt: skip
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        await bob.trusted.append(stolen)
        await alice.until(lambda: size_of(alice, BOB) == 6, "bob's log arrives")
        book = alice.trusted.invites
        assert book.holder(id_) is None
        await book.redeem(invite, WORKER.peer_id)
        assert book.holder(id_) == WORKER.peer_id
        holder = bob.trusted.invites.holder
        await bob.until(lambda: holder(id_) == WORKER.peer_id, "alice's log arrives")


@pytest.mark.parametrize("junk", [b"junk", encode(Carried(position=0, entry=b"")), SEAL])
async def test_a_seal_that_carries_anything_stops_nobody(tmp_path: Path, junk: bytes) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        own = bob.trusted.log_of(BOB.peer_id)
        assert own is not None
        await own.append([Carried(position=0, entry=junk)])
        await bob.trusted.append_verdict(verdict_at(0))
        await alice.until(lambda: bool(alice.events("ledger.mirror_failed")), "it is refused")


async def test_a_block_that_names_a_worker_twice_stops_nobody(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(BOB) as bob:
        own = bob.trusted.log_of(BOB.peer_id)
        assert own is not None
        await bob.trusted.append_verdict(verdict_at(0))
        database = bob.trusted._database  # it does what no honest peer does
        await database.transact(lambda connection: own.prune_within(connection, 1))
        bets = [SealedCapital(submissions=1, entered=[0] * 7)]
        await own.append([*[SealedWorker(worker=WORKER.peer_id, capitals=bets)] * 2, SEALED])
        await bob.trusted.append_verdict(verdict_at(1))
        async with swarm.peer(ALICE) as alice:
            await alice.until(lambda: size_of(alice, BOB) == own.size(), "bob's log arrives")


async def test_a_home_of_an_earlier_version_of_swarm_starts(tmp_path: Path) -> None:
    """Its older manifests cannot be read; the owner has signed a newer one."""
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice:
        await alice.node.database.transact(
            lambda connection: connection.execute(
                "INSERT INTO manifests (run, version, digest, envelope) VALUES (?, 0, ?, ?)",
                (swarm.run, bytes(32), b"signed long ago"),
            )
        )
    async with swarm.peer(ALICE) as alice:
        versions = alice.node.stored_versions(swarm.run)
        assert b"signed long ago" not in [version.raw for version in versions]
