"""Evidence of proven faults: kept, bounded, served, and refused if its parts do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from swarm.errors import PeerError
from swarm.ledger import faults
from swarm.ledger.client import open_ledger
from swarm.ledger.faults import FaultRecord
from swarm.wire.messages import CheckpointReference, Message, StepOrder, Submission
from tests.ledger.harness import ALICE, OWNER, TRAINER, WORKER, Peer, Swarm, identity, sealed

REFERENCE = CheckpointReference(lineage=0, step=2, digest=bytes(32), size_bytes=1)


def record_of(lab: Swarm, file: bytes, **changes: bytes) -> FaultRecord:
    """The evidence of a fault of the worker in `file`."""
    order = StepOrder(
        step=3,
        revision=0,
        checkpoint=REFERENCE,
        nonce=bytes(32),
        groups_wanted=8,
        submissions_max=9,
        run_digest=blake3(lab.manifest.body.payload).digest(),
    )
    submission = Submission(
        lineage=0,
        step=3,
        policy=2,
        number=0,
        digest=blake3(file).digest(),
        size_bytes=len(file),
        groups=1,
    )
    return FaultRecord(
        **{
            "announcement": sealed(WORKER, submission, lab.run).raw,
            "order": sealed(TRAINER, order, lab.run).raw,
            "manifest": lab.manifest.raw,
            **changes,
        }
    )


async def kept(peer: Peer, lab: Swarm, file: bytes) -> bytes:
    """Have a peer keep the evidence of a fault in `file`; returns the file's digest."""
    await peer.node.disk.write("incoming/file", file)
    await peer.trusted.faults.keep(record_of(lab, file).opened, "incoming/file")
    assert not peer.node.disk.exists("incoming/file")
    return blake3(file).digest()


async def test_anyone_can_fetch_the_evidence_of_a_fault(tmp_path: Path) -> None:
    file = bytes(range(256)) * 5000  # more than fits into one answer
    lab = Swarm(tmp_path)
    async with lab.peer(ALICE) as alice, lab.peer(WORKER) as anyone:
        digest = await kept(alice, lab, file)
        await anyone.node.reach(ALICE.peer_id)
        async with open_ledger(anyone.node.transport, ALICE.peer_id) as client:
            found = await client.fault(digest, WORKER.peer_id)
            assert found is not None
            record, size = found
            assert record.opened.worker == WORKER.peer_id
            assert record.opened.order.step == 3
            assert await client.fault_file(digest, size) == file
            assert await client.fault(bytes(32), WORKER.peer_id) is None
            with pytest.raises(PeerError, match="no such evidence"):
                await client.fault_file(bytes(32), 1)


async def test_evidence_outlasts_a_restart_and_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "FAULTS_MAX", 2)
    lab = Swarm(tmp_path)
    async with lab.peer(ALICE) as alice:
        digests = [await kept(alice, lab, bytes([number])) for number in range(3)]
        await alice.node.disk.write(f"{faults.FOLDER}/left-behind", b"x")
    async with lab.peer(ALICE) as alice:
        sizes = [alice.trusted.faults.record(digest, WORKER.peer_id)[1] for digest in digests]
        assert sizes == [0, 1, 1], "the oldest is dropped"
        assert len(alice.node.disk.list(faults.FOLDER)) == 2


def test_messages_that_do_not_fit_together_prove_nothing(tmp_path: Path) -> None:
    lab = Swarm(tmp_path)
    good = record_of(lab, b"file")
    assert good.opened.problem() is None

    def order(signer, **changes: object) -> bytes:
        message: Message = good.opened.order
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        return sealed(signer, StepOrder(**{**fields, **changes}), lab.run).raw

    for changes, words in (
        ({"order": order(TRAINER, step=4)}, "different steps"),
        ({"order": order(WORKER)}, "not signed by a trainer"),
        ({"order": order(TRAINER, run_digest=bytes(32))}, "another run manifest"),
        ({"order": good.announcement}, "not an announcement, a step order"),
        ({"announcement": sealed(WORKER, good.opened.submission, "x/y").raw}, "different runs"),
        ({"announcement": good.announcement[:-1] + b"?"}, "invalid message"),
        ({"manifest": sealed(OWNER, good.opened.manifest, "x/y").raw}, "different runs"),
    ):
        with pytest.raises(ValueError, match=words):
            _ = record_of(lab, b"file", **changes).opened


async def test_two_workers_faults_in_the_same_file_are_both_kept(tmp_path: Path) -> None:
    """Else the second eviction could not be checked: the evidence would name the first worker."""
    lab = Swarm(tmp_path)
    async with lab.peer(ALICE) as alice:
        store, another = alice.trusted.faults, identity(60)
        digest = await kept(alice, lab, b"shared")
        submission = record_of(lab, b"shared").opened.submission
        record = record_of(lab, b"shared", announcement=sealed(another, submission, lab.run).raw)
        await alice.node.disk.write("incoming/file", b"shared")
        await store.keep(record.opened, "incoming/file")
        for worker in (WORKER, another):
            raw, size = store.record(digest, worker.peer_id)
            assert faults.decode_record(raw).opened.worker == worker.peer_id and size == 6
