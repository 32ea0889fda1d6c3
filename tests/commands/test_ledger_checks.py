"""`swarm ledger verify`, `prove`, `export` and `why`: over the network, from a home, offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from swarm.errors import UserError
from swarm.ledger import merkle, proof_file
from swarm.ledger.archive import Archive
from swarm.ledger.audit import audit
from swarm.ledger.entries import Evicted, encode
from swarm.ledger.log import Log
from swarm.ledger.proof_file import KeptProofs, Proven
from swarm.ledger.receipts import Receipt
from swarm.ledger.wire import ForkEvidence
from swarm.look.archives import archive_in_home, fetch_archive, read_export, write_export
from swarm.look.onlooker import status_of
from swarm.look.prefixes import resolve
from swarm.look.why import (
    about_peer,
    about_submission,
    peer_lines,
    peer_named,
    submission_lines,
    submission_named,
)
from swarm.run.run import Run
from swarm.wire.identity import Identity
from swarm.wire.messages import Check, Eviction, Evidence, LogHead, Reinstatement
from swarm.world.disk import LocalDisk
from swarm.world.home import FORMAT_FILE, HOME_FORMAT
from tests.commands.harness import complaint, swarm
from tests.ledger.harness import (
    ALICE,
    BOB,
    OWNER,
    TRAINER,
    WORKER,
    InlineDisk,
    Peer,
    Swarm,
    identity,
    in_virtual_time,
    receipts,
    sealed,
    verdict_at,
)

LIE = b"\xab" * 32

REFUSED: dict[str, Any] = {
    "submission": LIE,
    "outcome": "refused",
    "failed": "proofs",
    "rewards": [],
    "detail": "3 of 40 proofs do not fit the policy's activations",
    "checks": [
        Check(name="schema", figure=0, threshold=0, passed=True),
        Check(name="proofs", figure=0.925, threshold=1, passed=False),
    ],
    "evidence": Evidence(tokens=100, mismatches=7, sampler=[1], policy=[2], text=[3], selection=[]),
}


Seen = tuple[Archive, list[Receipt]]


def collected(tmp_path: Path) -> Seen:
    """The archive of a run in which Alice accepted three submissions, and refused one and evicted
    its worker, and the worker's receipts."""
    found: list[Seen] = []

    async def main() -> None:
        lab = Swarm(tmp_path)
        async with (
            lab.peer(TRAINER),
            lab.peer(ALICE) as alice,
            lab.peer(BOB) as bob,
            lab.apart(identity(50)) as onlooker,
        ):
            for number in range(3):
                await alice.trusted.append_verdict(verdict_at(number))
            await alice.trusted.append_verdict(verdict_at(9, WORKER, **REFUSED))
            await alice.trusted.evict(WORKER.peer_id, "another policy", LIE, 0.5, 1.0)
            await bob.until(lambda: _mirrored(bob) == 5, "bob mirrors alice")
            archive = await fetch_archive(onlooker.node, Run(lab.manifest))
            found.append((archive, await receipts(onlooker.node, ALICE.peer_id, WORKER.peer_id)))

    in_virtual_time(main)
    return found[0]


def _mirrored(peer: Peer) -> int:
    log = peer.trusted.log_of(ALICE.peer_id)
    assert log is not None
    return log.size()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return collected(tmp_path_factory.mktemp("ledger"))


@pytest.fixture(scope="module")
def archive(seen: Seen) -> Archive:
    return seen[0]


@pytest.fixture(scope="module")
def kept(seen: Seen) -> list[Receipt]:
    """The worker's receipts; the last one is of its refused submission."""
    return seen[1]


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """The home of the worker."""
    home = home_of(WORKER, tmp_path / "worker")
    (home / "identity.pub").write_text(f"{WORKER.peer_id}\n")
    return home


def keep(home: Path, archive: Archive, receipts: Sequence[Receipt]) -> None:
    """Let the worker of a home be admitted, and keep receipts."""

    async def main() -> None:
        kept = KeptProofs(LocalDisk(home).database("peer.sqlite"), archive.run, 1 << 20)
        await kept.open()
        await kept.keep([Proven(archive.signed, receipt) for receipt in receipts])
        assert not receipts or kept.next_index(ALICE.peer_id) == receipts[-1].index + 1

    trio.run(main)


def home_of(key: Identity, home: Path) -> Path:
    """A home with a key and the name of its format, as a peer leaves it."""
    home.mkdir(exist_ok=True)
    (home / FORMAT_FILE).write_text(f'{{"format": {HOME_FORMAT}}}')
    (home / "identity.key").write_text(key.seed.hex())
    (home / "identity.key").chmod(0o600)
    return home


def bobs_home(tmp_path: Path) -> tuple[Archive, Path]:
    """The archive of the run, and the home of Bob, who mirrors Alice's log."""
    archive, _ = collected(tmp_path)
    return archive, home_of(BOB, tmp_path / BOB.peer_id)


def problems(archive: Archive) -> str:
    """Everything that an audit has to say against the logs."""
    return "; ".join(sentence for log in audit(archive) for sentence in [*log.problems, *log.forks])


def test_logs_of_honest_peers_are_sound(archive: Archive) -> None:
    assert not archive.problems
    trainer, alice, bob = audit(archive)
    assert (trainer.entries, alice.entries, bob.entries) == (0, 5, 0)
    assert alice.verdicts == 4 and alice.heads >= 1
    assert problems(archive) == ""
    assert [log.notes for log in (trainer, alice, bob)] == [[], [], []]


async def test_the_log_of_a_silent_peer_is_read_from_a_mirror(tmp_path: Path) -> None:
    lab = Swarm(tmp_path)
    async with lab.peer(BOB) as bob, lab.apart(identity(50)) as onlooker:
        async with lab.peer(ALICE) as alice:
            await alice.trusted.append_verdict(verdict_at(0))
            await bob.until(lambda: _mirrored(bob) == 1, "bob mirrors alice")
        await trio.sleep(5)
        archive = await fetch_archive(onlooker.node, Run(lab.manifest))
        assert any(ALICE.peer_id in problem for problem in archive.problems)
        assert BOB.peer_id in (await status_of(onlooker.node, Run(lab.manifest))).present
        assert len(archive.logs[ALICE.peer_id].entries) == 1


def test_an_export_can_be_checked_again(archive: Archive, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    rows = write_export(archive, file)
    again = read_export(file)
    assert again.run == archive.run
    assert {owner: log.entries for owner, log in again.logs.items() if log.entries} == {
        ALICE.peer_id: archive.logs[ALICE.peer_id].entries
    }
    assert problems(again) == ""
    assert again.state == archive.state
    assert write_export(again, file) == rows
    outcome = swarm("ledger", "verify", file)
    assert outcome.status == 0, outcome.errors
    assert f"{ALICE.peer_id} (validator): sound, 5 entries" in outcome.output
    assert swarm("ledger", "verify", file, "--owner", OWNER.peer_id).status == 0
    assert "belongs to" in complaint("ledger", "verify", file, "--owner", BOB.peer_id)


def test_tables_have_named_fields_and_credits(archive: Archive) -> None:
    rows = list(archive.rows())
    judged = [row for row in rows if row["type"] == "judged"]
    assert judged[0]["worker"] == WORKER.peer_id and judged[0]["samples"] == 4
    assert judged[3]["failed"] == "proofs" and judged[3]["evidence"]["mismatches"] == 7
    (credit,) = [row for row in rows if row["type"] == "credit"]
    assert (credit["peer"], credit["samples"]) == (WORKER.peer_id, 12)


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    for name, text in (
        ("empty.jsonl", ""),
        ("list.jsonl", "[1]\n"),
        ("half.jsonl", '{"type": "head", "owner": "x", "raw": "00"}\n'),
        ("torn.jsonl", '{"type": "mani'),
        ("other.csv", "a,b\n1,2\n"),
        ("hex.jsonl", '{"type": "manifest", "owner": "", "raw": "zz"}\n'),
    ):
        (tmp_path / name).write_text(text)
        assert "is no export of a ledger" in complaint("ledger", "verify", tmp_path / name)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "is no proof" in complaint("ledger", "verify", tmp_path / "deep.json")


def test_an_eviction_that_nobody_signed_is_passed_over(archive: Archive, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    write_export(archive, file)
    raw = encode(Evicted(peer=WORKER.peer_id, reason="", envelope=b"nothing"))
    row = {"owner": BOB.peer_id, "index": 0, "type": "evicted", "raw": raw.hex()}
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    again = read_export(file)
    assert about_peer(again, WORKER.peer_id) == about_peer(archive, WORKER.peer_id)


def test_a_changed_entry_is_found(archive: Archive, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    write_export(archive, file)
    lines = file.read_text().splitlines()
    entry = next(i for i, line in enumerate(lines) if '"type": "judged"' in line)
    row = json.loads(lines[entry])
    row["raw"] = row["raw"].replace("a86163636570746564", "a772656675736564")  # accepted, refused
    lines[entry] = json.dumps(row)
    file.write_text("\n".join(lines))
    outcome = swarm("ledger", "verify", file)
    assert outcome.status == 1
    assert "FORKED" in outcome.output or "NOT SOUND" in outcome.output
    assert "verdict 0 differs from the log entry" in outcome.output


def test_contradictory_heads_are_shown_as_a_fork(archive: Archive) -> None:
    forked = Archive(archive.signed, dict(archive.logs))
    held = max(archive.logs[ALICE.peer_id].heads.values(), key=lambda head: head.body.sequence)
    for size, words in (
        (5, "two different heads of 5 entries"),
        (3, "a head of 3 entries after one of 5"),
    ):
        lie = sealed(
            ALICE, LogHead(size=size, root=bytes(32)), archive.run, sequence=held.body.sequence + 1
        )
        forked.forks = [ForkEvidence(held.raw, lie.raw)]
        assert words in problems(forked)
    older = sealed(ALICE, LogHead(size=3, root=bytes(32)), archive.run)
    forked.forks = [ForkEvidence(older.raw, held.raw)]
    assert "head of 3 entries is not the head of the first 3 entries" in problems(forked)
    # What another peer signed, or signed for another run, says nothing against Alice.
    for innocent in (
        sealed(BOB, LogHead(size=3, root=bytes(32)), archive.run),
        sealed(ALICE, LogHead(size=3, root=bytes(32)), "other/run"),
    ):
        forked.forks = [ForkEvidence(innocent.raw, held.raw)]
        assert problems(forked) == ""


async def test_entries_that_their_owner_may_not_write_are_found(tmp_path: Path) -> None:
    lab = Swarm(tmp_path)
    async with lab.peer(TRAINER) as trainer, lab.apart(identity(50)) as onlooker:
        await trainer.trusted.append_verdict(verdict_at(0))
        forged = sealed(BOB, Eviction(peer=WORKER.peer_id, reason="no"), lab.run)
        await trainer.trusted.append(
            [
                Evicted(peer=WORKER.peer_id, reason="no", envelope=forged.raw),
                Evicted(peer=WORKER.peer_id, reason="no", envelope=b"nonsense"),
            ]
        )
        found = audit(await fetch_archive(onlooker.node, Run(lab.manifest)))[0].problems
        assert "a verdict in the log of a peer that is no validator" in found[0]
        assert "not signed by" in found[1] and "invalid" in found[2]
        assert len(found) == 3


# --- proofs ----------------------------------------------------------------------------------


def test_a_receipt_is_proven_offline(
    archive: Archive, kept: list[Receipt], worker: Path, tmp_path: Path
) -> None:
    table, file = tmp_path / "run.jsonl", tmp_path / "receipt.json"
    proving = ("--home", worker, "--out", file)
    (worker / "peer.sqlite").touch()
    assert "keeps no proofs: only workers keep them" in complaint("ledger", "prove", "0", *proving)
    keep(worker, archive, [])
    assert "keeps no proof yet" in complaint("ledger", "prove", "0", *proving)
    keep(worker, archive, kept)
    assert "has no submission 'eeee'" in complaint("ledger", "prove", "eeee", *proving)
    assert swarm("ledger", "prove", LIE.hex()[:13], *proving).status == 0
    outcome = swarm("ledger", "verify", file)
    assert outcome.status == 0, outcome.errors
    assert f"was refused by {ALICE.peer_id}, a validator of the run {archive.run}" in outcome.output
    assert swarm("ledger", "verify", file, "--owner", OWNER.peer_id).status == 0
    other = swarm("ledger", "verify", file, "--owner", BOB.peer_id)
    assert other.status == 1 and "belongs to" in other.errors
    assert file.stat().st_size < 8192
    write_export(archive, table)
    outcome = swarm("ledger", "verify", file, "--from", table)
    assert outcome.status == 0 and "it is entry 3 of the 5 that the log has now" in outcome.output


def test_a_changed_proof_proves_nothing(archive: Archive, kept: list[Receipt]) -> None:
    file, other = (proof_file.file_of(Proven(archive.signed, kept[index])) for index in (1, 2))

    def problem(**changes: Any) -> str | None:
        changed = msgspec.structs.replace(file, **changes)
        return proof_file.read(msgspec.json.encode(changed)).problem()

    assert problem() is None
    assert problem(index=2) is not None
    assert problem(entry=other.entry) is not None
    assert problem(verdict=other.verdict) is not None
    assert problem(proof=file.proof[:-1]) is not None
    foreign = sealed(BOB, archive.manifest, f"{BOB.peer_id}/{archive.manifest.name}")
    assert problem(manifest=foreign.raw.hex()) == (
        "verdict and run manifest belong to different runs"
    )
    with pytest.raises(ValueError, match="it holds no receipt"):
        proof_file.read(b"{}")


# --- why -------------------------------------------------------------------------------------


def test_a_refused_contributor_reads_what_happened_and_what_to_do(archive: Archive) -> None:
    submission = submission_named(archive, LIE.hex()[:20])
    page = "\n".join(submission_lines(about_submission(archive, submission)))
    assert "refused by " + ALICE.peer_id in page
    assert "3 of 40 proofs do not fit the policy's activations (proofs: 0.925 against 1)" in page
    assert "what it means:  the policy, run again over your text" in page
    assert "what to do:     start the peer with an empty `checkpoints` folder" in page
    assert "passed (figure/threshold): schema 0/0" in page
    assert "recomputed: 100 tokens, 7 of them" in page
    assert "credited: 0 completions" in page


def test_a_peer_is_explained_with_its_eviction(archive: Archive) -> None:
    peer = peer_named(archive, WORKER.peer_id[:12])
    told = about_peer(archive, peer)
    assert told["totals"]["accepted"] == 3 and told["failed"] == {"proofs": 1}
    page = "\n".join(peer_lines(told))
    assert "evicted on " in page and "another policy" in page
    assert f"swarm ledger check-eviction {WORKER.peer_id}" in page
    trainer = "\n".join(peer_lines(about_peer(archive, archive.manifest.trainers[0].peer)))
    assert "(nothing judged yet)" in trainer and "evidence" not in trainer


def test_prefixes_must_name_one(archive: Archive) -> None:
    with pytest.raises(UserError, match="submissions begin with 0000"):
        submission_named(archive, "0000")
    near = LIE.hex()[:11] + "f"
    with pytest.raises(UserError, match=rf"near it: .*{LIE.hex()[:12]}"):
        submission_named(archive, near)
    for prefix in ("00", "ffff"):
        with pytest.raises(UserError, match="has no submission"):
            submission_named(archive, prefix)
    with pytest.raises(UserError, match="2 peers end with wxyz: abcdwxyz, efghwxyz; give more"):
        resolve("wxyz", ["abcdwxyz", "efghwxyz", "wxy"], "peer")
    assert resolve("wxyz", ["wxyz1", "abcdwxyz"], "peer") == "wxyz1", "a beginning comes first"
    assert resolve("…wxyz", ["wxyz1", "abcdwxyz"], "peer") == "abcdwxyz"


async def test_a_reinstated_peer_is_not_evicted(tmp_path: Path) -> None:
    lab = Swarm(tmp_path)
    async with lab.peer(ALICE) as alice, lab.apart(identity(50)) as onlooker:
        await alice.trusted.append_verdict(verdict_at(9, WORKER, **REFUSED))
        await alice.trusted.evict(WORKER.peer_id, "a mistake", LIE, 0.5, 1.0)
        await trio.sleep(1)
        pardon = Reinstatement(peer=WORKER.peer_id, reason="sorry")
        await alice.trusted.reinstate(sealed(OWNER, pardon, lab.run, at=trio.current_time()).raw)
        archive = await fetch_archive(onlooker.node, Run(lab.manifest))
        told = about_peer(archive, WORKER.peer_id)
        assert not told["evicted"]
        assert [each["what"] for each in told["history"]] == ["evicted", "reinstated"]
        assert told["evidence"]["p_value"] == 1.0, "earlier evidence does not count"


def test_a_home_of_a_trusted_peer_can_be_read(tmp_path: Path) -> None:
    archive, home = bobs_home(tmp_path)
    found = archive_in_home(home, None)
    assert found.logs[ALICE.peer_id].entries == archive.logs[ALICE.peer_id].entries
    assert problems(found) == ""
    page = swarm("why", LIE.hex()[:20], "--from", home).output
    assert "the check proofs failed" in page and f"which only {ALICE.peer_id} keeps" in page
    record = swarm("ledger", "--from", home, "--peer", WORKER.peer_id[-8:]).output
    assert "(3 accepted, 1 refused)" in record
    assert "has no ledger.sqlite" in complaint("ledger", "verify", tmp_path)


def test_a_home_is_read_at_one_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peer prunes a log after the reader has learnt where the log begins."""
    archive, home = bobs_home(tmp_path)
    database = InlineDisk(home).database("ledger.sqlite")
    log = Log(database, ALICE.peer_id)

    def prune(start: int) -> None:
        trio.run(lambda: database.transact(lambda c: log.prune_within(c, start)))

    prune(1)
    peaks_of = merkle.peaks_of

    def meanwhile(size: int) -> Any:
        monkeypatch.setattr(merkle, "peaks_of", peaks_of)
        prune(3)
        return peaks_of(size)

    monkeypatch.setattr(merkle, "peaks_of", meanwhile)
    found = archive_in_home(home, None).logs[ALICE.peer_id]
    assert log.start() == 3, "it was pruned meanwhile"
    assert found.origin.start == 1
    assert found.entries == archive.logs[ALICE.peer_id].entries[1:]
    database.close()


def test_a_hostile_table_ends_no_command_with_a_traceback(archive: Archive, tmp_path: Path) -> None:
    """A malformed entry, a verdict that is none, nesting without end."""
    file = tmp_path / "logs.jsonl"
    write_export(archive, file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    entry = next(row for row in rows if row["type"] == "judged")
    entry["raw"] = "ff00"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    for command in (("why", WORKER.peer_id), ("ledger", "export", "--out", out)):
        said = complaint(*command, "--from", file)
        assert "a malformed log entry" in said and "swarm ledger verify" in said
    assert "malformed" in problems(read_export(file))
    verdict = next(row for row in rows if row["type"] == "verdict")
    entry["raw"], verdict["raw"] = archive.logs[ALICE.peer_id].entries[0].hex(), rows[0]["raw"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_export(read_export(file), out)
    assert "is not signed by" in problems(read_export(file))
    file.write_text("[" * 100_000)
    assert "is no export of a ledger" in complaint("ledger", "verify", file)


@pytest.mark.parametrize("named", [WORKER.peer_id[-8:], f"…{WORKER.peer_id[-8:]}", "inference-1"])
def test_a_peer_is_named_by_how_logs_write_it(archive: Archive, named: str, tmp_path: Path) -> None:
    """By the end of its id, or by its home beside the file that is read."""
    (tmp_path / "inference-1").mkdir()
    (tmp_path / "inference-1/identity.pub").write_text(WORKER.peer_id + "\n")
    table = tmp_path / "ledger.jsonl"
    write_export(archive, table)
    assert WORKER.peer_id in swarm("why", named, "--from", table).output
    assert LIE.hex() in swarm("why", LIE.hex()[-6:], "--from", table).output
    assert WORKER.peer_id in swarm("ledger", "check-eviction", named, "--from", table).output
