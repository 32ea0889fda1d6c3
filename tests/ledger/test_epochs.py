"""Sealed epochs: what a seal carries, who may prune, and who is believed."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from peers.validator.eviction import Records
from swarm.errors import PeerError
from swarm.ledger import epochs
from swarm.ledger.archive import Archive
from swarm.ledger.audit import anchor, audit
from swarm.ledger.client import open_ledger
from swarm.ledger.entries import Carried, CheckpointPublished, Consumed, Sealed, SealedWorker
from swarm.ledger.epochs import Epoch, records_of
from swarm.ledger.proof_file import Proven
from swarm.ledger.sealing import SEALS_MAX, Books
from swarm.ledger.state import Authority, Base, Frontier, Record, Totals, ledger_state
from swarm.look.archives import fetch_archive
from swarm.node import sealing
from swarm.wire.identity import Identity
from swarm.wire.manifest import Limits, Thresholds
from swarm.wire.messages import CheckpointReference, Evidence, StepOrder, Verdict
from tests.ledger.harness import (
    ALICE,
    BOB,
    OWNER,
    TRAINER,
    WORKER,
    Peer,
    Swarm,
    identity,
    receipts,
    sealed,
    verdict_at,
)
from tests.network.harness import manifest, sealed_manifest

EPOCH = 60
EVE = identity(9)
BETS = [5, -3, 2, 0, 0, 0, 0]
EVIDENCE = Evidence(tokens=40, sampler=BETS, policy=BETS, text=BETS, selection=BETS)


def a_swarm(folder: Path, validators: Sequence[Identity] = (ALICE, BOB)) -> Swarm:
    swarm = Swarm(folder)
    changed = msgspec.structs.replace(
        manifest([TRAINER], validators),
        thresholds=Thresholds(stake_steps=2, measured_tokens=1),
        limits=Limits(epoch_entries=EPOCH),
    )
    swarm.manifest = sealed_manifest(OWNER, changed)
    return swarm


def proven(number: int, step: int, worker: Identity) -> Callable[[int], Verdict]:
    return verdict_at(number, worker, step=step, evidence=EVIDENCE)


class Run:
    """The trusted peers of a run, and what they write."""

    def __init__(self, swarm: Swarm, peers: Sequence[Peer]) -> None:
        self.swarm = swarm
        self.peers = {peer.node.peer_id: peer for peer in peers}
        self.step = 0
        self.lineage = 0
        self.authority = Authority.of((OWNER.peer_id,), swarm.manifest.message)  # type: ignore[arg-type]

    async def advance(self, steps: int) -> None:
        """Two judged and consumed submissions, and a policy, for each step."""
        trainer = self.peers[TRAINER.peer_id].trusted
        for _ in range(steps):
            self.step += 1
            for number, validator in enumerate((ALICE, BOB)):
                if validator.peer_id in self.peers:
                    name = 10 * self.step + number
                    judge = self.peers[validator.peer_id].trusted
                    await judge.append_verdict(proven(name, self.step, WORKER if number else EVE))
                    await trainer.append(
                        [
                            Consumed(
                                step=self.step,
                                submission=name.to_bytes(32, "big"),
                                outcomes=["consumed", "zero-advantage"],
                            )
                        ]
                    )
            await trainer.append(
                [CheckpointPublished(lineage=self.lineage, step=self.step, manifest=bytes(32))]
            )
        self.order()

    def order(self) -> None:
        """The newest step's order is known to everybody."""
        policy = CheckpointReference(
            lineage=self.lineage, step=self.step, digest=bytes(32), size_bytes=1
        )
        order = StepOrder(
            step=self.step, revision=1, checkpoint=policy, nonce=bytes(32), groups_wanted=1,
            submissions_max=1,
        )  # fmt: skip
        envelope = sealed(TRAINER, order, self.swarm.run, sequence=1000 + self.step)
        for peer in self.peers.values():
            peer.run_node.order.set(envelope)

    async def look(self, rounds: int = 4) -> None:
        """Let everybody look at the logs a few times."""
        await trio.sleep(rounds * sealing.LOOK_SECONDS + 5)

    def logs(self, peer: Peer) -> list[list[Record]]:
        """The logs that a peer holds."""
        found = []
        for owner in self.authority.trusted:
            log = peer.trusted.log_of(owner)
            assert log is not None
            start = log.start()
            found.append(records_of(owner, start, log.entries(start, 100_000)))
        return found

    def totals(self, peer: Peer) -> dict[str, Totals]:
        """Every worker's totals, as they follow from the logs that a peer holds."""
        logs = self.logs(peer)
        base = epochs.base_of(logs, self.authority.trusted)
        records = [record for log in logs for record in log]
        return dict(ledger_state(records, self.authority, base=base).totals)

    def sizes(self, peer: Peer) -> list[int]:
        return [log.size() for o in self.authority.trusted if (log := peer.trusted.log_of(o))]

    def starts(self, peer: Peer) -> list[int]:
        return [log.start() for o in self.authority.trusted if (log := peer.trusted.log_of(o))]


def standing(peer: Peer, worker: str) -> float:
    return Records(peer.run_node.run, peer.trusted).standing(worker).log_capital


@asynccontextmanager
async def everything(folder: Path) -> AsyncIterator[tuple[Run, Peer, Peer, Peer]]:
    """A run with the trainer and both validators."""
    swarm = a_swarm(folder)
    async with swarm.peer(TRAINER) as trainer, swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        yield Run(swarm, [trainer, alice, bob]), trainer, alice, bob


async def test_a_sealed_epoch_is_pruned_and_nothing_that_counts_is_lost(tmp_path: Path) -> None:
    async with everything(tmp_path) as (run, trainer, alice, bob):
        await run.advance(10)
        await alice.trusted.evict(EVE.peer_id, "a lie", (100).to_bytes(32, "big"), 1.0, 0.0)
        await run.advance(40)
        await run.look(rounds=0)
        whole = run.totals(trainer)
        against = standing(bob, WORKER.peer_id)
        await run.look()
        for peer in (trainer, alice, bob):
            assert min(run.starts(peer)) > 20, run.starts(peer)
            assert run.totals(peer) == whole
            assert not peer.events("ledger.false_seal") and not peer.events("ledger.forked")
            assert standing(peer, WORKER.peer_id) == pytest.approx(against, abs=0.1)
        (kept, *_) = await receipts(alice.node, BOB.peer_id, WORKER.peer_id)
        # what was credited and pruned is not credited again, whoever judges or consumes it again
        again = (50).to_bytes(32, "big")
        held_stake = trainer.trusted.stake(EVE.peer_id, run.step)
        await bob.trusted.append_verdict(proven(50, 5, EVE))
        await trainer.trusted.append(
            [Consumed(step=run.step, submission=again, outcomes=["consumed", "consumed"])]
        )
        await run.look(rounds=0)
        assert all(run.totals(peer) == whole for peer in (trainer, alice, bob))
        assert trainer.trusted.stake(EVE.peer_id, run.step) == held_stake
        # the logs go on, and proofs of what is left hold
        await run.advance(30)
        await run.look()
        assert trainer.events("ledger.sealed")[-1]["epoch"] == 1
        found = await receipts(alice.node, BOB.peer_id, WORKER.peer_id)
        assert found and all(each.problem() is None for each in found)
        assert run.totals(trainer)[WORKER.peer_id].accepted == 80
        # a newcomer's copy for records and audits
        async with run.swarm.apart(identity(50)) as newcomer:
            archive = await fetch_archive(newcomer.node, newcomer.run_node.run)
        assert archive.state.totals == run.totals(trainer)
        assert all(found.sound for found in audit(Archive.of_rows(archive.rows())))
        assert archive.logs[BOB.peer_id].origin.start > kept.index, "it is pruned now"
        kept_proof = Proven(archive.signed, kept)
        assert kept_proof.problem() is None
        now = anchor(kept_proof, archive)
        assert now.holds is None and "the validator's signature stands by itself" in now.sentence
        with pytest.raises(PeerError, match="sealed and pruned"):
            async with open_ledger(bob.node.transport, ALICE.peer_id) as client:
                await client.entries(ALICE.peer_id, 0, 1)


async def test_what_a_seal_carries_of_many_workers_makes_no_further_seal_due(
    tmp_path: Path,
) -> None:
    async with everything(tmp_path) as (run, trainer, alice, bob):
        await run.advance(1)
        for number in range(30):
            await alice.trusted.append_verdict(
                proven(1000 + number, run.step, identity(50 + number))
            )
            entry = Consumed(
                step=run.step,
                submission=(1000 + number).to_bytes(32, "big"),
                outcomes=["consumed", "consumed"],
            )
            await trainer.trusted.append([entry])
        await run.advance(20)
        await run.look()
        blocks = [
            record.entry.block
            for log in run.logs(bob)
            for record in log
            if isinstance(record.entry, Sealed)
        ]
        assert len(blocks) == 3 and sum(blocks) > EPOCH
        for _ in range(5):
            await run.advance(2)
            await run.look(rounds=1)
        assert len(trainer.events("ledger.sealed")) == 1
        await run.advance(4)
        await run.look()
        assert len(trainer.events("ledger.sealed")) == 2


async def test_who_lost_its_disk_begins_with_the_newest_seal(tmp_path: Path) -> None:
    swarm = a_swarm(tmp_path)
    async with swarm.peer(TRAINER) as trainer, swarm.peer(ALICE) as alice:
        async with swarm.peer(BOB) as bob:
            run = Run(swarm, [trainer, alice, bob])
            await run.advance(10)
            await alice.trusted.evict(EVE.peer_id, "a lie", b"", 1.0, 0.0)
            await run.advance(40)
            await run.look()
            size = bob.trusted.log_of(BOB.peer_id).size()  # type: ignore[union-attr]
            against, whole = standing(bob, WORKER.peer_id), run.totals(alice)
        shutil.rmtree(tmp_path / BOB.peer_id)
        async with swarm.peer(BOB) as bob:
            run.peers[BOB.peer_id] = bob
            await bob.until(lambda: bool(bob.events("ledger.restored")), "it is restored")
            await bob.until(lambda: run.starts(bob) == run.starts(alice), "all is mirrored")
            assert bob.trusted.log_of(BOB.peer_id).size() >= size  # type: ignore[union-attr]
            assert bob.run_node.run.evicted(EVE.peer_id) is not None
            assert run.totals(bob) == whole
            assert standing(bob, WORKER.peer_id) == pytest.approx(against, abs=0.01)
            assert bob.trusted.stake(WORKER.peer_id, run.step) > 0
            await run.advance(40)  # it takes part in the next seal, and prunes
            await run.look()
            assert len(bob.events("ledger.sealed")) == 1
            assert not bob.events("ledger.false_seal")
            assert run.starts(bob) == run.starts(trainer)


@pytest.mark.slow
async def test_a_peer_that_was_away_for_three_epochs_comes_back(tmp_path: Path) -> None:
    swarm = a_swarm(tmp_path)
    async with swarm.peer(TRAINER) as trainer, swarm.peer(ALICE) as alice:
        async with swarm.peer(BOB) as bob:
            run = Run(swarm, [trainer, alice, bob])
            await run.advance(5)
            await run.look(rounds=0)
        del run.peers[BOB.peer_id]
        for _ in range(4):
            await run.advance(50)
            await run.look()
        assert len(alice.events("ledger.sealed")) == 4
        starts = run.starts(alice)
        assert min(starts[:2]) > 100, "two of three have sealed, and a later epoch"
        async with swarm.peer(BOB) as bob:
            run.peers[BOB.peer_id] = bob
            run.order()
            await bob.until(lambda: len(bob.events("ledger.skipped")) == 2, "it skips")
            await run.look()
            assert run.totals(bob) == run.totals(alice)
            await run.advance(40)
            await run.look()
            assert bob.events("ledger.sealed")[-1]["epoch"] == 4
            assert not bob.events("ledger.false_seal") + alice.events("ledger.false_seal")
            assert not bob.events("ledger.forked")


@pytest.mark.parametrize("what", ["credit", "root"])
async def test_a_false_seal_is_reported_and_nothing_is_pruned(tmp_path: Path, what: str) -> None:
    async with everything(tmp_path) as (run, trainer, alice, bob):
        await run.advance(50)
        await run.look(rounds=0)
        block = honest_block(run, trainer)
        seal = block[-1]
        assert isinstance(seal, Sealed)
        if what == "credit":
            paid = next(entry for entry in block if isinstance(entry, SealedWorker))
            more = msgspec.structs.replace(paid, final=paid.final + 1)
            block = [more if entry is paid else entry for entry in block]
            workers = {e.worker: e for e in block if isinstance(e, SealedWorker)}
            totals = {w: totals_of(e) for w, e in workers.items()}
            block[-1] = msgspec.structs.replace(seal, totals=epochs.totals_digest(totals))
        else:
            logs = [msgspec.structs.replace(log, root=bytes(32)) for log in seal.logs]
            block[-1] = msgspec.structs.replace(seal, logs=logs)
        await trainer.trusted.append(block)
        await run.look()
        for peer in (alice, bob):
            (told,) = peer.events("ledger.false_seal")
            assert told["owner"] == TRAINER.peer_id and told["epoch"] == 0
            assert not peer.events("ledger.sealed")
            assert run.starts(peer) == [0, 0, 0]
        assert run.starts(trainer) == [0, 0, 0]


@pytest.mark.parametrize(
    "wrong", [{"step": 10**6}, {"step": 1}, {"logs": 1}], ids=["future", "past", "pruned"]
)
async def test_a_second_seal_that_nobody_can_check_stops_nobody(
    tmp_path: Path, wrong: dict[str, int]
) -> None:
    """After a rollback, the first trusted peer seals the old lineage for ever, or what it sealed
    before, or names sizes of which the others hold no hashes."""
    async with everything(tmp_path) as (run, trainer, alice, bob):
        await run.advance(50)
        await run.look()
        starts = run.starts(alice)
        assert min(starts) > 20
        _, last = epochs.seals_in(run.logs(trainer)[0])[-1]
        run.lineage = 1
        await run.advance(2)
        logs = last.logs
        if "logs" in wrong:
            logs = [msgspec.structs.replace(log, size=log.first - 9) for log in logs]
        lie = {"epoch": 1, "step": wrong.get("step", last.step + 1), "logs": logs, "block": 0}
        await trainer.trusted.append([msgspec.structs.replace(last, **lie)])
        await run.look()
        for peer in (alice, bob):
            assert len(peer.events("ledger.sealed")) == 1 and run.starts(peer) == starts
            assert not peer.events("ledger.false_seal")


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [None, 0], ids=["every epoch", "one epoch"])
async def test_thousands_of_false_seals_cost_the_others_no_time(
    tmp_path: Path, epoch: int | None
) -> None:
    """One trusted peer fills its log with seals; the others seal and prune."""
    async with everything(tmp_path) as (run, trainer, alice, bob):
        await run.advance(30)
        await run.look(rounds=0)
        seal = honest_block(run, bob)[-1]
        lies = [
            msgspec.structs.replace(
                seal, epoch=number if epoch is None else epoch, totals=number.to_bytes(32, "big")
            )
            for number in range(3000)
        ]
        await bob.trusted.append(lies)
        await bob.until(lambda: run.sizes(trainer) == run.sizes(bob), "the lies are copied")
        books = Books(trainer.trusted._database, TRAINER.peer_id)
        assert len(books.seals()[BOB.peer_id]) == SEALS_MAX
        del run.peers[BOB.peer_id]
        await run.advance(10)
        await run.look()
        await run.advance(50)
        await run.look()
        for peer in (trainer, alice):
            assert [told["epoch"] for told in peer.events("ledger.sealed")] == [0, 1]
            assert min(run.starts(peer)[:2]) > 20, "pruned"
        told = {told["owner"] for told in trainer.events("ledger.false_seal")}
        assert told == ({BOB.peer_id} if epoch == 0 else set()), "epochs to come are ignored"


async def test_a_repeated_step_keeps_its_stakes_when_the_first_attempt_is_pruned(
    tmp_path: Path,
) -> None:
    """A rollback after the seal, and before the pruning: balances are kept by step."""
    async with everything(tmp_path) as (run, trainer, alice, bob):
        await run.advance(50)
        await run.look(rounds=0)
        sealed_at = run.step - run.authority.rules.hold_steps
        await trainer.trusted.append(honest_block(run, trainer))
        run.lineage, run.step = 1, sealed_at - 3  # the trainer goes back, and repeats steps
        again = run.step + 1

        await bob.trusted.append_verdict(
            verdict_at(9000, WORKER, step=again, lineage=1, evidence=EVIDENCE)
        )
        await run.look(rounds=0)
        # The seal of the old lineage is still good, and the others sign it now.
        run.lineage, run.step = 1, sealed_at + run.authority.rules.hold_steps
        run.order()
        await run.look()
        for peer in (trainer, alice, bob):
            assert min(run.starts(peer)) > 20, run.starts(peer)
            rows = peer.trusted.tables._database.read(
                "SELECT tokens FROM balances WHERE worker = ? AND step = ? ORDER BY 1",
                (WORKER.peer_id, again),
            )
            assert rows == [(40,)], "of the new lineage, not of the old one"


async def test_who_drops_an_eviction_from_its_seal_is_found_out(tmp_path: Path) -> None:
    async with everything(tmp_path) as (run, trainer, alice, bob):
        await run.advance(5)
        await alice.trusted.evict(EVE.peer_id, "a lie", b"", 1.0, 0.0)
        await run.advance(45)
        await run.look(rounds=0)
        block = honest_block(run, alice)
        assert any(isinstance(entry, Carried) for entry in block)
        forged = [entry for entry in block if not isinstance(entry, Carried)]
        seal = forged[-1]
        assert isinstance(seal, Sealed)
        forged[-1] = msgspec.structs.replace(seal, block=len(forged) - 1)
        await trainer.trusted.append(honest_block(run, trainer))
        await alice.trusted.append(forged)
        await run.look()
        for peer in (trainer, bob):
            (told,) = peer.events("ledger.false_seal")
            assert told["owner"] == ALICE.peer_id
            log = peer.trusted.log_of(ALICE.peer_id)
            assert log is not None and log.start() == 0, "what it dropped is still here"


def honest_block(run: Run, peer: Peer, *, less: int = 0) -> list[Any]:
    """The block with which a peer would seal the logs that it holds, up to `less` steps before
    the last that it could seal."""
    logs, sizes = run.logs(peer), {}
    for log, owner in zip(logs, run.authority.trusted, strict=True):
        sizes[owner] = (len(log), log)
    roots = {o: peer.trusted.log_of(o).root(sizes[o][0]) for o in run.authority.trusted}  # type: ignore[union-attr]
    frontier = Frontier(run.lineage, run.step - run.authority.rules.hold_steps - less)
    epoch = Epoch.computed(0, frontier, sizes, roots, run.authority, Base())
    return epoch.block(sizes[peer.node.peer_id][1], peer.node.peer_id)


def totals_of(entry: SealedWorker) -> Totals:
    names = ("accepted", "refused", "quarantined", "groups", "samples", "verified", "final", "void")
    return Totals(**{name: getattr(entry, name) for name in names})
