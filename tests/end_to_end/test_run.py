"""A whole run of real peers completes, and its ledgers agree with the trainer's state."""

from __future__ import annotations

import json
from pathlib import Path

import trio

from tests.commands.harness import swarm as command
from tests.end_to_end.harness import STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts


def test_a_run_completes_and_every_rollout_is_accounted_for(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    logs = tmp_path / "logs"

    async def main() -> Path:
        names = ["bootstrap", "relay", "trainer", "validator", "inference-1", "inference-2"]
        async with swarm(tmp_path, base, fork_server, names=names, steps=6) as peers:
            await peers.start()
            folder = await peers.complete(6 * STEP_SECONDS)
            for peer in [peers["trainer"], *peers.of_role("inference")]:
                assert await peer.ended(30) == 0, peer.complaints
            accounts = check_accounts(peers)
            workers = {peer.identity.peer_id for peer in peers.of_role("inference")}
            # This short run may end before a submission of the slower worker is judged.
            assert accounts.state.totals.keys() <= workers
            assert accounts.state.totals
            for totals in accounts.state.totals.values():
                assert totals.accepted > 0
                assert totals.refused == totals.quarantined == 0
            outcomes = [o for each in accounts.state.consumed.values() for o in each]
            assert {"consumed", "zero-advantage"} <= set(outcomes)
            for worker in peers.of_role("inference"):
                if worker.identity.peer_id in accounts.state.totals:
                    assert worker.heard("inference.receipt", outcome="accepted")
            logs.mkdir()
            for name, peer in peers.peers.items():
                lines = [f"{json.dumps(event)}\n" for event in peer.events]
                (logs / f"{name}.jsonl").write_text("".join(lines))
            return folder

    folder = trio.run(main)
    check_trace_of_a_trained_submission(logs)

    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    untrained = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert trained.keys() == untrained.keys()
    assert any(not trained[name].equal(untrained[name]) for name in trained)


def check_trace_of_a_trained_submission(logs: Path) -> None:
    """`swarm trace` finds its whole way in the logs, each hop on the peer that made it."""
    told = [json.loads(line) for line in (logs / "trainer.jsonl").read_text().splitlines()]
    submission = next(e for e in told if e["event"] == "trainer.trained_on")["submissions"][0]
    found = json.loads(command("trace", submission[:16], "--logs", logs, "--json").output)
    assert found["submission"] == submission
    at = {span["event"]: (span["began"], span["ended"], span["peer"]) for span in found["spans"]}
    made, delivered, judged, heard, pooled, trained = (
        at[event]
        for event in (
            "inference.submission_made",
            "inference.submission_delivered",
            "validator.verdict",
            "inference.receipt",
            "trainer.submission_pooled",
            "trainer.trained_on",
        )
    )
    assert made[2] == delivered[2] == heard[2]
    assert pooled[2] == trained[2]
    assert len({made[2], judged[2], trained[2]}) == 3
    assert made[1] <= delivered[1] and judged[1] <= pooled[1] <= trained[1]
    assert made[0] < made[1] and judged[0] < judged[1]
