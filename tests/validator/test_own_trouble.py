"""A validator's own trouble is no fault of the submission that it judges meanwhile."""

from __future__ import annotations

import trio

from simnet.simulation import Peer, Simulation
from swarm.wire.manifest import Thresholds
from swarm.wire.messages import Acknowledgement, Verdict
from tests.validator.test_numbers import Hand, kinds, simulate
from tests.validator.test_rank import in_rank


def test_a_worker_that_repeats_an_announcement_takes_no_file_from_a_second_opinion() -> None:
    """It has had no receipt of the first validator, which was stopped, and asks the second."""

    async def test(simulation: Simulation, peers: dict[str, Peer], worker: Hand) -> None:
        first, second = in_rank(worker, peers)
        judged = simulation.expect("validator.verdict", [first.name])
        assert kinds(await worker.deliver(first, 0)) == [Acknowledgement]
        assert await simulation.meet(judged, 60)
        await trio.sleep(1)
        assert kinds(await worker.deliver(second, 0)) == [Verdict]
        await trio.sleep(60)

    said = simulate(
        test, "validator", "validator-2",
        thresholds=Thresholds(second_share=1.0, measured_tokens=1),
        prefill_tokens_per_second=200.0,
    )  # fmt: skip
    verdicts = [event.fields for event in said if event.name == "validator.verdict"]
    assert [each["second"] for each in verdicts] == [False, True]
    assert {each["outcome"] for each in verdicts} == {"accepted"}
