"""Trusted peers over the memory network: receipts, mirrors, crashes, lost disks, evictions."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from peers.owner.signing import reinstate
from swarm.errors import PeerError, UserError
from swarm.ledger.client import LedgerClient, open_ledger
from swarm.ledger.entries import CheckpointPublished, Evicted, Judged, Reinstated, decode
from swarm.ledger.log import Log
from swarm.ledger.mirror import FORKS_MAX, Fork, LogMirror, forks_in
from swarm.ledger.wire import PROTOCOL, ForkEvidence, contradiction, explained
from swarm.run.run import Run
from swarm.wire.envelope import Envelope
from swarm.wire.identity import Identity
from swarm.wire.messages import Evidence, LogHead, Reinstatement, Verdict
from tests.ledger.harness import (
    ALICE,
    BOB,
    OWNER,
    TRAINER,
    WORKER,
    InlineDisk,
    Peer,
    Swarm,
    fetch,
    identity,
    receipts,
    sealed,
    verdict_at,
)


def recomputed(number: int, worker: Identity = WORKER, **changes: Any) -> Callable[[int], Verdict]:
    return verdict_at(number, worker, evidence=Evidence(tokens=40), **changes)


def entries_of(peer: Peer, owner: str) -> list[object]:
    log = peer.trusted.log_of(owner)
    assert log is not None
    return [decode(raw) for raw in log.entries(0, 10_000)]


async def test_a_worker_can_prove_that_its_receipts_are_in_the_log(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(WORKER) as worker:
        for number in range(70):
            await alice.trusted.append_verdict(verdict_at(number))
            await alice.trusted.append_verdict(verdict_at(1000 + number, BOB))
        found = await receipts(worker.node, ALICE.peer_id, WORKER.peer_id)
        assert [receipt.verdict.number for receipt in found] == list(range(70))
        assert all(receipt.problem() is None for receipt in found)
        assert all(receipt.verdict.worker == WORKER.peer_id for receipt in found)
        fetched = await fetch(worker.node, ALICE.peer_id)
        judged = [entry for entry in fetched if isinstance(entry, Judged)]
        assert len(judged) == 140
        assert judged[0].groups == 2
        assert judged[0].samples == 4
        with pytest.raises(PeerError, match="does not speak"):
            await fetch(alice.node, WORKER.peer_id)


async def test_verdicts_in_parallel_stand_at_the_index_they_name(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(alice.trusted.append_verdict, verdict_at(number))
            nursery.start_soon(
                alice.trusted.append,  # type: ignore[arg-type]
                [CheckpointPublished(lineage=0, step=number, manifest=bytes(32))],
            )
        await alice.until(lambda: len(alice.trusted.tables.verdicts(100)) == 20, "20 verdicts")
        entries = entries_of(alice, ALICE.peer_id)
        for envelope in alice.trusted.tables.verdicts(100):
            entry = entries[envelope.message.log_index]  # type: ignore[attr-defined]
            assert isinstance(entry, Judged)
            assert entry.submission == envelope.message.submission  # type: ignore[attr-defined]


async def test_trusted_peers_mirror_each_other_and_know_a_workers_record(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        for number in range(8):
            await alice.trusted.append_verdict(recomputed(number, step=number))
        await bob.until(lambda: bob.trusted.stake(WORKER.peer_id, 8) == 320, "bob knows it")
        assert bob.trusted.stake(WORKER.peer_id, 103) == 160, "old work counts no more"
        assert entries_of(bob, ALICE.peer_id) == entries_of(alice, ALICE.peer_id)
        assert not bob.events("ledger.forked")


async def test_nobody_is_answered_by_a_trusted_part_that_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The transport and its streams outlast the part, whose database is closed."""
    swarm = Swarm(tmp_path)
    async with swarm.apart(ALICE) as alice, swarm.peer(BOB) as bob, trio.open_nursery() as nursery:

        async def ask_for_an_append() -> None:
            message = Reinstatement(peer=WORKER.peer_id)
            pardon = sealed(OWNER, message, swarm.run, at=trio.current_time())
            async with open_ledger(bob.node.transport, ALICE.peer_id) as client:
                with pytest.raises(PeerError, match="ended the ledger stream"):
                    await client.reinstate(pardon)

        appending = alice.trusted._appending
        async with alice.run_node.joined():
            stream = await bob.node.transport.open_stream(ALICE.peer_id, PROTOCOL)
            assert await LedgerClient(stream).head(ALICE.peer_id) is not None
            await alice.trusted.append_verdict(recomputed(0, BOB))
            await appending.acquire()  # as if its disk were slow
            nursery.start_soon(ask_for_an_append)
            await bob.until(lambda: appending.statistics().tasks_waiting == 1, "bob asks")
        appending.release()
        with pytest.raises(PeerError, match="ended the ledger stream"):
            await LedgerClient(stream).head(ALICE.peer_id)
        with pytest.raises(PeerError, match="ended the ledger stream"):
            await fetch(bob.node, ALICE.peer_id)
    assert not caplog.records


async def test_a_restarted_validator_goes_on_with_its_log(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(BOB) as bob:
        async with swarm.peer(ALICE) as alice:
            await alice.trusted.append_verdict(verdict_at(0))
            await alice.trusted.evict(WORKER.peer_id, "x" * 900, b"", 1.0, 0.0)
            await bob.until(lambda: len(entries_of(bob, ALICE.peer_id)) == 2, "bob mirrors alice")
        async with swarm.peer(ALICE) as alice:
            assert alice.run_node.run.evicted(WORKER.peer_id) is not None
            assert [e.message.number for e in alice.trusted.tables.verdicts(100)] == [0]  # type: ignore[attr-defined]
            envelope = await alice.trusted.append_verdict(verdict_at(1, outcome="refused"))
            assert envelope.message.log_index == 2  # type: ignore[attr-defined]
            assert [e.message.number for e in alice.trusted.tables.verdicts(1)] == [1]  # type: ignore[attr-defined]
            await bob.until(lambda: len(entries_of(bob, ALICE.peer_id)) == 3, "bob mirrors on")
            assert not bob.events("ledger.forked")


async def test_a_validator_that_lost_its_disk_takes_its_log_back(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(BOB) as bob:
        async with swarm.peer(ALICE) as alice:
            for number in range(600):
                await alice.trusted.append_verdict(verdict_at(number))
            await bob.until(lambda: len(entries_of(bob, ALICE.peer_id)) == 600, "bob mirrors alice")
        shutil.rmtree(tmp_path / ALICE.peer_id)
        async with swarm.peer(ALICE) as alice:
            envelope = await alice.trusted.append_verdict(verdict_at(600))
            assert envelope.message.log_index == 600  # type: ignore[attr-defined]
            assert alice.events("ledger.restored") == [{"entries": 600}]
            await bob.until(lambda: len(entries_of(bob, ALICE.peer_id)) == 601, "bob mirrors on")
            assert not bob.events("ledger.forked")


async def rewrite_log(swarm: Swarm, entries: int) -> None:
    """Put another log in place of Alice's."""
    home = swarm.folder / ALICE.peer_id
    for file in home.glob("ledger.sqlite*"):
        file.unlink()
    database = InlineDisk(home).database("ledger.sqlite")
    await LogMirror.create_tables(database)
    await Log(database, ALICE.peer_id).append(
        [CheckpointPublished(lineage=0, step=7, manifest=bytes(32)) for _ in range(entries)]
    )
    database.close()


async def test_a_rewritten_log_is_noticed_by_its_mirrors(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(BOB) as bob, swarm.peer(ALICE) as alice:
        for number in range(3):
            await alice.trusted.append_verdict(verdict_at(number))
        before = entries_of(alice, ALICE.peer_id)
        await bob.until(lambda: len(entries_of(bob, ALICE.peer_id)) == 3, "bob mirrors alice")
    await rewrite_log(swarm, 5)
    async with swarm.peer(ALICE), swarm.peer(BOB) as bob:
        await bob.until(lambda: bool(bob.events("ledger.forked")), "bob sees the fork")
        fork = bob.events("ledger.forked")[0]
        assert fork["owner"] == ALICE.peer_id
        assert "forked" in fork["reason"]
        assert entries_of(bob, ALICE.peer_id) == before
        (evidence,) = bob.trusted.forks()
        first, second = evidence.opened()
        assert first.sender == second.sender == ALICE.peer_id
        assert explained(first, second) == (
            "its head of 5 entries does not follow from its head of 3"
        )
        async with open_ledger(bob.node.transport, ALICE.peer_id) as client:
            assert (await client.status()).forks == [], "nobody accuses itself"


async def test_signed_contradictions_are_kept_and_bounded(tmp_path: Path) -> None:
    def head(size: int, root: int, sequence: int) -> Envelope:
        return sealed(ALICE, LogHead(size=size, root=bytes([root] * 32)), "o/r", sequence=sequence)

    assert (
        contradiction(head(3, 1, 7), head(3, 2, 8)) == "it signed two different heads of 3 entries"
    )
    assert contradiction(head(2, 1, 8), head(3, 1, 7)) == (
        "it signed a head of 2 entries after one of 3"
    )
    assert contradiction(head(3, 1, 7), head(5, 2, 8)) is None, "this needs the entries"
    with pytest.raises(ValueError, match="different logs"):
        other = sealed(BOB, LogHead(size=3, root=bytes(32)), "o/r")
        ForkEvidence(head(3, 1, 7).raw, other.raw).opened()
    database = InlineDisk(tmp_path).database("ledger.sqlite")
    await LogMirror.create_tables(database)
    mirror = LogMirror(database, ALICE.peer_id)
    for size in range(10):
        await mirror.keep(ForkEvidence(head(size, 1, 10).raw, head(size, 2, 11).raw))
    assert len(forks_in(database)) == FORKS_MAX
    database.close()


async def test_a_peer_whose_own_log_was_rewritten_stops(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(BOB) as bob:
        async with swarm.peer(ALICE) as alice:
            for number in range(3):
                await alice.trusted.append_verdict(verdict_at(number))
            await bob.until(lambda: len(entries_of(bob, ALICE.peer_id)) == 3, "bob mirrors alice")
        for size in (2, 3, 5):
            await rewrite_log(swarm, size)
            with pytest.RaisesGroup(Fork, flatten_subgroups=True):
                async with swarm.peer(ALICE):
                    await trio.sleep(30)


async def test_evictions_spread_and_only_the_owner_takes_them_back(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        evil = identity(77)
        await alice.trusted.evict(evil.peer_id, "copied rollouts", b"\x01" * 32, 3.0, 0.0)
        await bob.until(
            lambda: bob.run_node.run.evicted(evil.peer_id) is not None, "bob hears of it"
        )
        entry = entries_of(alice, ALICE.peer_id)[-1]
        assert isinstance(entry, Evicted)
        assert entry.peer == evil.peer_id
        await trio.sleep(1)
        pardon = sealed(
            OWNER,
            Reinstatement(peer=evil.peer_id, reason="a mistake"),
            swarm.run,
            at=trio.current_time(),
        )
        bob.run_node.gossip.publish(pardon)
        await alice.until(
            lambda: alice.run_node.run.evicted(evil.peer_id) is None, "alice hears of it"
        )
    async with swarm.peer(ALICE) as alice:
        assert alice.run_node.run.evicted(evil.peer_id) is None


async def test_the_owner_reinstates_a_peer_through_any_trusted_peer(tmp_path: Path) -> None:
    evil = identity(77)
    swarm = Swarm(tmp_path)
    async with (
        swarm.peer(ALICE) as alice,
        swarm.peer(BOB) as bob,
        swarm.apart(identity(50)) as owner,
    ):
        run = Run(swarm.manifest)
        key = tmp_path / "owner.key"
        key.write_text(OWNER.seed.hex())
        key.chmod(0o600)
        with pytest.raises(UserError, match="not evicted"):
            await reinstate(owner.node, run, evil.peer_id, "why not", key)
        await alice.trusted.evict(evil.peer_id, "copied rollouts", b"\x01" * 32, 3.0, 0.0)
        other = tmp_path / "other.key"
        other.write_text(BOB.seed.hex())
        other.chmod(0o600)
        with pytest.raises(UserError, match="only that key can change it"):
            await reinstate(owner.node, run, evil.peer_id, "a mistake", other)
        done = await reinstate(owner.node, run, evil.peer_id, "a mistake", key)
        assert done.peer == evil.peer_id
        assert done.eviction.reason == "copied rollouts"
        assert done.logged == sorted([ALICE.peer_id, BOB.peer_id])
        await trio.sleep(1)
        for peer in (alice, bob):
            assert peer.run_node.run.evicted(evil.peer_id) is None
            entries = [
                entry
                for entry in entries_of(peer, peer.node.peer_id)
                if isinstance(entry, Reinstated)
            ]
            assert [entry.reason for entry in entries] == ["a mistake"], "logged once"
        async with open_ledger(owner.node.transport, ALICE.peer_id) as client:
            forged = sealed(BOB, Reinstatement(peer=evil.peer_id), swarm.run)
            with pytest.raises(PeerError, match="no reinstatement signed by the owner"):
                await client.reinstate(forged)


async def test_a_peer_the_manifest_does_not_name_has_no_trusted_part(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(WORKER) as worker:
        assert alice.run_node.trusted_part("validator") is alice.trusted
        with pytest.raises(UserError, match=f"{WORKER.peer_id} as a validator"):
            worker.run_node.trusted_part("validator")
        with pytest.raises(UserError, match=f"{ALICE.peer_id} as a trainer"):
            alice.run_node.trusted_part("trainer")
    async with swarm.peer(TRAINER) as trainer:
        assert trainer.run_node.trusted_part("trainer") is trainer.trusted
