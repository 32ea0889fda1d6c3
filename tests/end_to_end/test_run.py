"""A whole run of real peers completes, and its ledgers agree with the trainer's state."""

from __future__ import annotations

from pathlib import Path

import trio

from tests.end_to_end.harness import STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts


def test_a_run_completes_and_every_rollout_is_accounted_for(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
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
            return folder

    folder = trio.run(main)

    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    untrained = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert trained.keys() == untrained.keys()
    assert any(not trained[name].equal(untrained[name]) for name in trained)
