"""`swarm status` and `swarm ledger`: their requests, in virtual time, and their output."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, Literal

import trio
from hypothesis import given
from rich.console import Console
from rich.text import Text

from peers.validator.eviction import Records
from swarm.commands.ledger import receipt_lines, receipt_rows
from swarm.commands.status import status_lines, status_object
from swarm.errors import PeerError, UserError
from swarm.events import Event, Lines
from swarm.ledger.archive import Archive
from swarm.ledger.entries import Consumed
from swarm.look.archives import fetch_archive, leave_out_unsound
from swarm.look.onlooker import RunStatus, status_of
from swarm.look.why import about_peer, peer_lines
from swarm.run.members import Standing
from swarm.run.run import Run
from swarm.terminal.exit import exit_with
from swarm.terminal.output import to_json
from swarm.terminal.screen import Earned
from swarm.wire.messages import (
    Checkpoint,
    CheckpointReference,
    EnvironmentEvaluation,
    Evaluation,
    Evidence,
    Heartbeat,
    Present,
    Reinstatement,
    StepOrder,
)
from tests.commands.harness import swarm
from tests.ledger.harness import (
    ALICE,
    BOB,
    OWNER,
    TRAINER,
    WORKER,
    Peer,
    Swarm,
    identity,
    manifest,
    sealed,
    verdict_at,
)
from tests.ledger.test_evidence import CHEATED
from tests.network.harness import sealed_manifest
from tests.network.test_untrusted import HOSTILE, controls

ORDER = StepOrder(
    step=3,
    revision=0,
    checkpoint=CheckpointReference(lineage=0, step=2, digest=bytes(32), size_bytes=1),
    nonce=bytes(32),
    groups_wanted=8,
    submissions_max=9,
)
CHECKPOINT = Checkpoint(
    reference=CheckpointReference(lineage=0, step=2, digest=bytes(32), size_bytes=1),
    total_bytes=1,
    reward=0.5,
)
EVALUATION = Evaluation(
    reference=CHECKPOINT.reference,
    state="done",
    tasks=64,
    reward=0.5,
    environments=[
        EnvironmentEvaluation(label="sort-digits", reward=0.5, low=0.4, high=0.6, tokens=7.25)
    ],
)


def printed(lines: list[Text], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    return console.file.getvalue()  # type: ignore[attr-defined]


async def test_a_status_is_told_by_any_trusted_peer_without_admission(tmp_path: Path) -> None:
    lab = Swarm(tmp_path)
    async with (
        lab.peer(TRAINER) as trainer,
        lab.peer(ALICE) as alice,
        lab.peer(WORKER) as worker,
        lab.apart(identity(50)) as onlooker,
    ):
        await trainer.run_node.announce(CHECKPOINT, 600)
        await trainer.run_node.announce(ORDER, 600)
        await alice.run_node.announce(EVALUATION, 600)
        await trio.sleep(11)
        run = Run(onlooker.run_node.run.manifest_envelope)
        began = trio.current_time()
        status = await status_of(onlooker.node, run)
        assert trio.current_time() - began < 2.0
        assert status.order == ORDER and status.checkpoint == CHECKPOINT
        assert {TRAINER.peer_id, ALICE.peer_id, WORKER.peer_id} <= set(status.present)
        assert onlooker.node.peer_id not in status.present, "who looks on is not admitted"
        told = json.loads(to_json(status_object(status)))
        assert (told["step"], told["policy"], told["state"]) == (3, 2, "wants 8 groups")
        told = told["evaluation"]
        assert (told["policy"], told["reward"], told["by"]) == (2, 0.5, ALICE.peer_id)
        page = printed(status_lines(status))
        assert "held-out tasks 0.500 at policy 2" in page
        assert "held-out tasks of sort-digits: 0.500 [0.400, 0.600], 7.2 tokens" in page
        assert worker.run_node.lease is not None and alice.trusted is not None


async def record_of(onlooker: Peer, run: Run) -> Archive:
    """As `swarm ledger` asks for it."""
    archive = await fetch_archive(onlooker.node, run, WORKER.peer_id)
    leave_out_unsound(archive)
    return archive


def test_a_liars_word_about_the_run_is_not_taken() -> None:
    run = Run(sealed_manifest(OWNER, manifest([TRAINER], [ALICE])))
    status = RunStatus(run)
    newer = manifest([WORKER], [WORKER], version=9)
    for envelope in (
        sealed(WORKER, ORDER, run.id),
        sealed(TRAINER, ORDER, f"{OWNER.peer_id}/other"),
        sealed(WORKER, newer, run.id),
        sealed(WORKER, EVALUATION, run.id),
    ):
        status._take(envelope)
    assert status.order is None and status.evaluation is None and run.manifest.version == 1


async def test_a_record_has_the_receipts_of_all_validators_and_the_eviction(tmp_path: Path) -> None:
    lab = Swarm(tmp_path)
    async with lab.peer(ALICE) as alice, lab.peer(BOB) as bob, lab.apart(identity(50)) as onlooker:
        for number in range(100):
            await alice.trusted.append_verdict(verdict_at(number))
        await bob.trusted.append_verdict(
            verdict_at(
                200,
                outcome="refused",
                failed="proofs",
                rewards=[],
                evidence=Evidence(tokens=9, policy=[30_000], sampler=[0]),
            )
        )
        await bob.trusted.evict(WORKER.peer_id, "[/x]\x1b[2J cheated", bytes(32), 3.0, 0.0)
        run = Run(onlooker.run_node.run.manifest_envelope)
        began = trio.current_time()
        record = await record_of(onlooker, run)
        assert trio.current_time() - began < 2.0, "no round trip for each receipt"
        told = about_peer(record, WORKER.peer_id)
        assert (told["totals"]["groups"], told["totals"]["void"]) == (200, 4000)
        page = "\n".join(peer_lines(told))
        assert f"peer     {WORKER.peer_id}" in page
        assert "work     400 completions in 200 groups (100 accepted, 1 refused)" in page
        assert "credit   0 tokens final, 0 held, 4,000 void (0 recomputed)" in page
        assert told["evidence"]["p_value"] < 1e-9
        assert "that an honest peer ever looks like this (strongest: activations of other" in page
        assert "[/x]\\x1b[2J cheated" in page and told["evicted"]
        assert "101 receipts" in receipt_lines(receipt_rows(WORKER.peer_id, record), 20)[-1]
        bob.run_node.gossip.publish(
            sealed(OWNER, Reinstatement(peer=WORKER.peer_id), run.id, at=trio.current_time())
        )
        await trio.sleep(5)
        again = about_peer(await record_of(onlooker, run), WORKER.peer_id)
        assert not again["evicted"]
        held = again["totals"]
        assert (held["held"], held["void"]) == (3920, 80), "all but the fine is restored"
        assert again["evidence"]["log_capital"] == 0, "evidence before it does not count"
        await bob.trusted.append_verdict(verdict_at(201, evidence=CHEATED))
        cheats = about_peer(await record_of(onlooker, run), WORKER.peer_id)
        told_by_validator = Records(bob.run_node.run, bob.trusted).standing(WORKER.peer_id)
        assert cheats["evidence"]["log_capital"] == told_by_validator.log_capital > 0


async def test_what_two_validators_judged_is_credited_once(tmp_path: Path) -> None:
    """An acceptance stands if the trainer's log says that a step consumed one of its groups."""
    lab = Swarm(tmp_path)
    async with (
        lab.peer(TRAINER) as trainer,
        lab.peer(ALICE) as alice,
        lab.peer(BOB) as bob,
        lab.apart(identity(50)) as onlooker,
    ):
        for by in (alice, bob):
            await by.trusted.append_verdict(verdict_at(0))
        late: dict[str, Any] = {"outcome": "refused", "failed": "stale", "rewards": []}
        for number in (1, 2):
            await alice.trusted.append_verdict(verdict_at(number, **late))
            await bob.trusted.append_verdict(verdict_at(number))
        taken = Consumed(step=0, submission=(1).to_bytes(32, "big"), outcomes=["consumed"] * 2)
        await trainer.trusted.append([taken])
        run = Run(onlooker.run_node.run.manifest_envelope)
        record = await record_of(onlooker, run)
        told = about_peer(record, WORKER.peer_id)["totals"]
        assert (told["accepted"], told["refused"]) == (3, 0), "another's late refusal binds nobody"
        assert (told["groups"], told["samples"]) == (6, 12)
        rows = receipt_rows(WORKER.peer_id, record)
        credits = {(row["number"], row["by"]): row["credit"] for row in rows}
        assert credits == {
            (0, ALICE.peer_id): 40,
            (1, ALICE.peer_id): 0,
            (2, ALICE.peer_id): 0,
            (0, BOB.peer_id): 0,
            (1, BOB.peer_id): 40,
            (2, BOB.peer_id): 40,
        }


@given(doing=HOSTILE, role=HOSTILE, peer=HOSTILE)
def test_no_strangers_words_steer_the_screen(doing: str, role: str, peer: str) -> None:
    """The output is safe even for text that no message could contain."""
    status = RunStatus(Run(sealed_manifest(OWNER, manifest([TRAINER], [ALICE]))))
    for name in (peer, WORKER.peer_id):
        status.present[name] = Present(
            peer=name,
            heartbeat=Heartbeat(roles=[role, role], doing=doing, policy=3, bytes_sent=2**50),
            age_seconds=1.0,
            standing="live",
        )
    for listed_max in (2, 1):  # both peers, or a summary
        page = printed(status_lines(status, listed_max))
        assert set(controls(page)) <= {"\n"}
        assert all(len(line) <= 80 for line in page.splitlines()[3:])
    assert set(controls(to_json(status_object(status)))) == set()


def test_ids_can_be_copied_at_80_columns() -> None:
    status = RunStatus(Run(sealed_manifest(OWNER, manifest([TRAINER], [ALICE]))))
    for key, roles in ((TRAINER, ["trainer"]), (WORKER, ["inference", "relay"])):
        status.present[key.peer_id] = Present(
            peer=key.peer_id,
            heartbeat=Heartbeat(
                roles=roles,
                policy=123,
                step=124,
                bytes_sent=10**9,
                bytes_received=10**9,
                tokens_per_second=1000.0,
                reached="port mapped",
                doing="[/x] generating",
            ),
            age_seconds=1.0,
            standing="suspected",
        )
    page = printed(status_lines(status))
    for key in (TRAINER, WORKER):
        line = next(line for line in page.splitlines() if line.startswith(key.peer_id))
        assert len(line) <= 80 and line.endswith(" suspected")
    assert "\n  [/x] generating · policy 123 · step 124 · 1,000 tokens/s · sent 1.0 GB\n" in page, (
        "what does not fit is left out whole"
    )


def test_a_large_run_has_a_summary_that_fits_a_screen() -> None:
    status = RunStatus(Run(sealed_manifest(OWNER, manifest([TRAINER], [ALICE, BOB]))))
    gone = identity(7).peer_id
    left, finished = identity(8).peer_id, identity(9).peer_id
    standings: dict[str, Standing] = {
        BOB.peer_id: "suspected",
        gone: "gone",
        left: "gone",
        finished: "gone",
    }
    goodbyes: dict[str, Literal["left", "finished"]] = {left: "left", finished: "finished"}
    roles = {TRAINER.peer_id: ["trainer"], ALICE.peer_id: ["validator"], BOB.peer_id: ["validator"]}
    for key in [TRAINER, ALICE, BOB, *(identity(number) for number in range(5, 40))]:
        status.present[key.peer_id] = Present(
            peer=key.peer_id,
            heartbeat=Heartbeat(
                roles=roles.get(key.peer_id, ["inference", "relay"]),
                leaving=goodbyes.get(key.peer_id, ""),
            ),
            age_seconds=1.0,
            standing=standings.get(key.peer_id, "live"),
        )
    lines = printed(status_lines(status)).splitlines()
    assert len(lines) <= 40
    assert [line.split() for line in lines[3:9]] == [
        ["live", "suspected", "gone", "left", "finished", "evicted"],
        ["inference", "32", "0", "1", "1", "1", "0"],
        ["relay", "32", "0", "1", "1", "1", "0"],
        ["validator", "1", "1", "0", "0", "0", "0"],
        ["trainer", "1", "0", "0", "0", "0", "0"],
        ["all", "peers", "34", "1", "1", "1", "1", "0"],
    ]
    named = [line.split()[0] for line in lines if line.startswith("12D3KooW")]
    assert named[:2] == [TRAINER.peer_id, ALICE.peer_id], "whom the owner trusts"
    assert named[2:4] == [BOB.peer_id, gone], "who fell silent, trusted peers first"
    assert len(named) == 4
    every = printed(status_lines(status, listed_max=len(status.present))).splitlines()
    assert len(every) == 3 + 2 * 38


def test_what_a_peer_earned_is_summed_up() -> None:
    earned = Earned()
    for outcome, groups in (("accepted", 4), ("accepted", 3), ("refused", 0), ("quarantined", 2)):
        fields = {"outcome": outcome, "groups": groups, "completions": 8 * groups}
        earned(Event("inference.receipt", 0.0, "me", fields))
    stream = io.StringIO()
    Lines(stream)(Event("peer.earned", 0.0, "me", earned.totals()))
    assert stream.getvalue().endswith(
        "earned: 72 completions in 9 groups are credited; of the submissions 2 were accepted, "
        "1 refused, 1 quarantined\n"
    )


@given(HOSTILE)
def test_errors_steer_no_terminal(words: str) -> None:
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        exit_with(PeerError(f"somebody said: {words}"))
        exit_with(ExceptionGroup("", [UserError(words), ValueError(words)]))
    assert set(controls(told.getvalue())) <= {"\n"}


def test_the_version_is_told() -> None:
    assert swarm("--version").output.startswith("swarm 0.")
    assert swarm("peer", "--version").output == swarm("--version").output
