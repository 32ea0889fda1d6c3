"""Anyone can check an eviction again: a proven fault by its file, statistics by the logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio
from blake3 import blake3

from peers.environments.run_probe import probe_hashes
from peers.validator.eviction_check import (
    Checked,
    check_fault,
    check_statistics,
    fetch_evidence,
    is_proven_fault,
    newest_eviction,
)
from swarm.errors import UserError
from swarm.ledger.archive import Archive
from swarm.ledger.faults import Fault, FaultRecord
from swarm.look.archives import fetch_archive
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import write
from swarm.run.run import Run
from swarm.run.work import submission_order
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import CheckpointReference, Evidence, Reinstatement, StepOrder, Submission
from tests.ledger.harness import (
    ALICE,
    BOB,
    OWNER,
    TRAINER,
    WORKER,
    Swarm,
    identity,
    in_virtual_time,
    sealed,
    verdict_at,
)
from tests.network.harness import manifest, sealed_manifest
from tests.orders import ORDER, reference
from tests.validator.conftest import STOP_IDS, Stage
from tests.validator.test_inspector import Lists, changed


def run_manifest(stage: Stage) -> RunManifest:
    """The manifest of a run with the stage's tokenizer and environment."""
    hashes = probe_hashes(stage.policy, [reference()])
    return msgspec.structs.replace(
        manifest([TRAINER], [ALICE, BOB]),
        tokenizer_hash=hashes.tokenizer,
        environments=[reference(probe_hash=hashes.probes[0])],
        sampling=msgspec.structs.replace(ORDER.sampling, stop_ids=STOP_IDS),
    )


def evidence(
    stage: Stage, lab: Swarm, change: Callable[[Rollouts], Rollouts] = lambda rollouts: rollouts
) -> tuple[FaultRecord, bytes]:
    """The kept evidence of a worker's submission, `change`d after its generation."""
    signed = lab.manifest
    order = StepOrder(
        step=3,
        revision=0,
        checkpoint=CheckpointReference(lineage=0, step=1, digest=bytes(32), size_bytes=1),
        nonce=b"\x07" * 32,
        groups_wanted=8,
        submissions_max=9,
        run_digest=blake3(signed.body.payload).digest(),
    )
    submission = Submission(
        lineage=0, step=3, policy=1, number=0, digest=bytes(32), size_bytes=0, groups=4
    )
    named = submission_order(
        lab.run,
        signed.expect(RunManifest),
        order,
        worker=WORKER.peer_id,
        number=submission.number,
        entry=submission.entry,
        groups=submission.groups,
    )
    header, rollouts = stage.generate(**msgspec.structs.asdict(named))
    path = stage.folder / "kept"
    write(path, change(rollouts), header)
    file = path.read_bytes()
    submission = msgspec.structs.replace(
        submission, digest=blake3(file).digest(), size_bytes=len(file)
    )
    return (
        FaultRecord(
            announcement=sealed(WORKER, submission, lab.run).raw,
            order=sealed(TRAINER, order, lab.run).raw,
            manifest=signed.raw,
        ),
        file,
    )


def other_prompt(rollouts: Rollouts) -> Rollouts:
    def change(lists: Lists) -> None:
        lists["prompts"][4:8] = lists["prompts"][:4]

    return changed(rollouts, change)


def lab_of(stage: Stage, folder: Path) -> Swarm:
    lab = Swarm(folder)
    lab.manifest = sealed_manifest(OWNER, run_manifest(stage))
    lab.run = Run(lab.manifest).id
    return lab


def evicted(lab: Swarm, record: FaultRecord, file: bytes) -> tuple[Archive, Fault, bytes]:
    """Have Alice evict for a fault and keep the evidence; what anyone then fetches."""
    found: list[tuple[Archive, Fault, bytes]] = []
    digest = blake3(file).digest()

    async def main() -> None:
        async with lab.peer(ALICE) as alice, lab.apart(identity(50)) as anyone:
            await alice.node.disk.write("incoming/file", file)
            await alice.trusted.faults.keep(record.opened, "incoming/file")
            await alice.trusted.append_verdict(
                verdict_at(
                    0,
                    submission=digest,
                    outcome="refused",
                    failed="prompts",
                    proven_fault=True,
                    detail="prompts",
                    rewards=[],
                )
            )
            run = Run(lab.manifest)
            archive = await fetch_archive(anyone.node, run)
            found.append((archive, *await fetch_evidence(anyone.node, run, digest, WORKER.peer_id)))
            with pytest.raises(UserError, match="no trusted peer keeps the evidence"):
                await fetch_evidence(anyone.node, run, bytes(32), WORKER.peer_id)

    in_virtual_time(main)
    return found[0]


def check(archive: Archive, fault: Fault, file: bytes, folder: Path | None) -> Checked:
    checked = newest_eviction(archive, WORKER.peer_id)
    assert is_proven_fault(archive, checked)
    trio.run(check_fault, archive, checked, (fault, file), folder)
    return checked


def test_a_proven_fault_is_found_again(stage: Stage, tmp_path: Path) -> None:
    lab = lab_of(stage, tmp_path)
    archive, fault, file = evicted(lab, *evidence(stage, lab, other_prompt))
    checked = check(archive, fault, file, stage.policy)
    assert checked.confirmed
    assert checked.record.owner == ALICE.peer_id
    assert checked.eviction.reason == "proven fault: prompts"
    assert "the check prompts fails here too (4 against 0): row 4 does not have" in checked.lines[1]
    with pytest.raises(UserError, match="give --tokenizer the folder of the model"):
        check(archive, fault, file, None)


def test_an_invented_fault_is_not_confirmed(stage: Stage, tmp_path: Path) -> None:
    """A validator that evicts an honest worker is found out."""
    lab = lab_of(stage, tmp_path)
    archive, fault, file = evicted(lab, *evidence(stage, lab))
    checked = check(archive, fault, file, stage.policy)
    assert not checked.confirmed
    assert "all exact checks pass" in checked.lines[-1]
    other = check(archive, fault, file + b"x", stage.policy)
    assert not other.confirmed and "not the announced one" in other.lines[-1]


async def test_statistical_evidence_is_summed_again(tmp_path: Path) -> None:
    strong = Evidence(tokens=1000, mismatches=90, sampler=[9000] * 7, policy=[0], text=[0])
    weak = Evidence(tokens=1000, mismatches=1, sampler=[-10] * 7, policy=[0], text=[0])
    lab = Swarm(tmp_path)
    async with lab.peer(ALICE) as alice, lab.peer(BOB) as bob, lab.apart(identity(50)) as anyone:
        run = Run(lab.manifest)

        async def checked() -> Checked:
            archive = await fetch_archive(anyone.node, run)
            found = newest_eviction(archive, WORKER.peer_id)
            assert not is_proven_fault(archive, found)
            check_statistics(archive, found)
            return found

        await alice.trusted.append_verdict(verdict_at(0, evidence=weak))
        await alice.trusted.evict(WORKER.peer_id, "I do not like it", bytes(32), 1e-12, 1e-9)
        lie = await checked()
        assert not lie.confirmed and len(lie.lines) == 2
        for number in range(1, 5):
            await alice.trusted.append_verdict(verdict_at(number, evidence=strong))
        assert not (await checked()).confirmed, "what came after the eviction does not count"
        await bob.trusted.append_verdict(verdict_at(10, evidence=strong))
        await trio.sleep(1)
        await alice.trusted.evict(WORKER.peer_id, "tokens", bytes(32), 1e-12, 1e-9)
        assert (await checked()).confirmed
        pardon = Reinstatement(peer=WORKER.peer_id, reason="sorry")
        await trio.sleep(1)
        raw = sealed(OWNER, pardon, lab.run, at=trio.current_time()).raw
        await alice.trusted.reinstate(raw)
        await bob.trusted.reinstate(raw)
        await trio.sleep(1)
        await alice.trusted.evict(WORKER.peer_id, "again", bytes(32), 1e-12, 1e-9)
        assert not (await checked()).confirmed, "a reinstatement clears earlier evidence"
