"""The largest verdicts: they fit an envelope, and every peer on their way takes them.

`-s` prints the figures of `docs/benchmarks.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Plan, Simulation
from swarm.gossip import topics
from swarm.ledger.entries import Consumed, decode, encode, judged
from swarm.run.bounds import SUBMISSION_ROWS_MAX
from swarm.wire.envelope import ENVELOPE_BYTES_MAX, Envelope
from swarm.wire.manifest import SUBMISSION_GROUPS_MAX
from swarm.wire.messages import Check, Evidence, Verdict
from tests.ledger.harness import ALICE, BOB, WORKER, Swarm, receipts, sealed

LARGE = 2**40
PROCESSES = ("sampler", "policy", "text", "selection")


def largest(groups: int, group_size: int, index: int = 0) -> Verdict:
    """A verdict whose every field is as long as its type allows."""
    bets: dict[str, list[int]] = {name: [-(10**12)] * 32 for name in PROCESSES}
    return Verdict(
        submission=index.to_bytes(32, "big"),
        size_bytes=LARGE,
        worker=WORKER.peer_id,
        lineage=LARGE,
        step=LARGE,
        policy=LARGE,
        number=LARGE + index,
        outcome="quarantined",
        failed="x" * 40,
        detail="\N{GRINNING FACE}" * 500,
        checks=[Check(name="x" * 40, figure=0.1, threshold=0.1, passed=True)] * 32,
        rewards=[[0.1] * group_size] * groups,
        log_index=index,
        task_means=[0.1] * groups,
        task_spreads=[0.1] * groups,
        environments=[15] * groups,
        rollouts_digest=bytes(32),
        rollouts_bytes=LARGE,
        evidence=Evidence(tokens=LARGE, mismatches=LARGE, **bets),
        tokens=LARGE,
        share=0.1,
    )


def at(index: int) -> Callable[[int], Verdict]:
    return lambda log_index: msgspec.structs.replace(
        largest(SUBMISSION_GROUPS_MAX, SUBMISSION_ROWS_MAX // SUBMISSION_GROUPS_MAX, index),
        log_index=log_index,
    )


@pytest.mark.parametrize("group_size", [4, 5, 8, 64, 1024, 4096])
def test_the_largest_verdict_of_a_valid_run_fits_an_envelope(group_size: int) -> None:
    groups = min(SUBMISSION_GROUPS_MAX, SUBMISSION_ROWS_MAX // group_size)
    verdict = largest(groups, group_size)
    began = time.process_time()
    envelope = sealed(ALICE, verdict, "x" * 115)  # the longest id of a run
    seconds = time.process_time() - began
    assert len(envelope.raw) <= ENVELOPE_BYTES_MAX
    assert len(topics.encode(topics.Push(envelope.raw))) <= topics.FRAME_BYTES_MAX
    assert len(encode(judged(verdict))) < 2500
    print(f"{groups} x {group_size}: {len(envelope.raw)} bytes, {1000 * seconds:.1f} ms")


def test_4096_groups_in_a_verdict_need_a_bound_below_that_of_its_type() -> None:
    """Why a run has at most `SUBMISSION_GROUPS_MAX` groups in a submission."""
    with pytest.raises(ValueError, match="does not fit an envelope"):
        sealed(ALICE, largest(4096, 1), "x" * 115)


async def test_the_largest_verdicts_are_logged_mirrored_and_proven(tmp_path: Path) -> None:
    count = 20
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob, swarm.peer(WORKER) as worker:
        for number in range(count):
            await alice.trusted.append_verdict(at(number))
        found = await receipts(worker.node, ALICE.peer_id, WORKER.peer_id)
        assert len(found) == count
        assert all(receipt.problem() is None for receipt in found)
        mirror = bob.trusted.log_of(ALICE.peer_id)
        assert mirror is not None
        await bob.until(lambda: mirror.size() == count, "the log is mirrored")


def test_a_run_with_the_largest_submissions_trains() -> None:
    """4,096 completions each: acknowledged, judged, gossiped, logged and trained on."""
    verdicts: list[Envelope] = []
    entries: list[Any] = []
    steps = 2

    async def main() -> None:
        workload = Workload(model_bytes=500_000, completion_tokens_mean=16)
        simulation = Simulation(5, workload=workload)
        async with simulation.running():
            await start_bootstrap(
                simulation, trainers=["trainer"], validators=["v0", "v1"], steps=steps,
                groups_per_step=SUBMISSION_GROUPS_MAX, max_new_tokens=32, group_size=4,
                groups_per_submission=SUBMISSION_GROUPS_MAX,
            )  # fmt: skip
            over = simulation.expect("trainer.run_complete", ["trainer"])
            trainer = simulation.add(
                Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=5.0))
            )
            await trainer.start()
            for name, role in (("v0", "validator"), ("v1", "validator"), ("w0", "inference")):
                await simulation.add(Plan(name, [role])).start()
            while trainer.part is None:  # type: ignore[union-attr]  # noqa: ASYNC110
                await trio.sleep(0.1)
            trainer.part.gossip.listen(Verdict, verdicts.append)  # type: ignore[union-attr]
            assert await simulation.meet(over, 3000.0)
            log = trainer.part._trusted._log  # type: ignore[union-attr]
            entries.extend(decode(raw) for raw in log.entries(0, 10_000))
        assert simulation.violations == []

    run_virtual(main, seed=5, limit_seconds=4000)
    sizes = [len(each.raw) for each in verdicts]
    assert min(sizes) > 9 * SUBMISSION_ROWS_MAX
    consumed = [entry for entry in entries if isinstance(entry, Consumed)]
    assert sum(len(entry.outcomes) for entry in consumed) >= steps * SUBMISSION_GROUPS_MAX
    print(f"{len(sizes)} verdicts of {min(sizes)} to {max(sizes)} bytes")
