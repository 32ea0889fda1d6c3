"""Adversaries are caught or harmless, and bugs planted on purpose are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

import swarm.wire.envelope
from peers.trainer.accepted import AcceptedSubmissions
from simnet.faults import Crash
from simnet.scenarios import Scenario, mixed
from simnet.simulate import run_seed, simulate
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.node.trusted import VERDICT_LIFETIME_SECONDS, TrustedPart
from swarm.run.records import peer_key, run_key
from swarm.wire.envelope import Envelope
from swarm.wire.messages import Verdict

PEERS = 9
LIAR = "worker-3"
UNDISTURBED_SECONDS = 120.0


def run_with(
    kind: str | None,
    listen: Callable[[Peer, Event], None] = lambda peer, event: None,
    *,
    seed: int = 5,
    afterwards: Callable[[Simulation], Awaitable[None]] | None = None,
) -> tuple[dict[str, Any], Any]:
    """The report of a run with one adversary (or none), and what was said of it: counters by
    event, and by check of the verdicts on its work."""
    said: Counter[str] = Counter()
    failed: Counter[str] = Counter()

    async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
        liar = simulation.identity(LIAR).peer_id

        def hear(_now: float, peer: Peer, event: Event) -> None:
            listen(peer, event)
            if event.fields.get("remote") == liar or event.fields.get("source") == liar:
                said[event.name] += 1
            if event.name in VERDICTS and event.fields["worker"] == liar:
                failed[event.fields["failed"]] += 1

        simulation.listeners.append(hear)
        # Nothing goes wrong, so that for two minutes only the liar disturbs it.
        simulation.faults = [Crash(at=UNDISTURBED_SECONDS, peers=[], seconds=1.0)]
        adversaries = {LIAR: kind} if kind else {}
        figures = await mixed.be_well_again(
            simulation, mixed.names(peers), faults=0, adversaries=adversaries
        )
        if afterwards is not None:
            await afterwards(simulation)
        return figures

    scenario = Scenario("one liar", "", PEERS, PEERS, run, mixed.WORKLOAD)
    return simulate(scenario, seed=seed), (said, failed)


VERDICTS = ("validator.verdict", "validator.turned_down")


@pytest.mark.parametrize("kind", ["claimant", pytest.param("copier", marks=pytest.mark.slow)])
def test_a_file_that_another_hands_in_is_its_makers(kind: str) -> None:
    verdicts: dict[bytes, dict[str, str]] = {}
    made: Counter[str] = Counter()

    def listen(peer: Peer, event: Event) -> None:
        if event.name in VERDICTS:
            by_worker = verdicts.setdefault(event.fields["submission"], {})
            by_worker[event.fields["worker"]] = event.fields.get("outcome", "refused")
        if peer.name != LIAR and event.name in ("inference.submission_made", "inference.receipt"):
            made[event.name] += 1
            assert event.fields.get("outcome", "accepted") == "accepted", event.fields

    report, _ = run_with(kind, listen, seed=1 if kind == "claimant" else 2)
    assert report["violations"] == []
    assert made["inference.receipt"] == made["inference.submission_made"]
    copied = [by_worker for by_worker in verdicts.values() if len(by_worker) == 2]
    assert copied, "nobody copied anything"
    for by_worker in copied:
        assert sorted(by_worker.values()) == ["accepted", "refused"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, records_found", [("silent", True), ("sybil", True), ("eclipser", False)]
)
def test_among_liars_in_the_dht_newcomers_find_the_run(kind: str, records_found: bool) -> None:
    """Ids that were ground in many networks do hide records (docs/simulation.md); but who joins
    has the run from a bootstrap peer, and is told by gossip where the others are."""
    seconds: list[float] = []

    async def afterwards(simulation: Simulation) -> None:
        newcomer = simulation.add(Plan("newcomer", ["inference"]))
        loaded = simulation.expect("inference.policy_loaded", ["newcomer"])
        await newcomer.start()
        await simulation.meet(loaded, 30.0)
        assert newcomer.part is not None
        keys = (run_key(newcomer.part.run.id), peer_key(simulation.peers["trainer"].id))
        honest = [peer for peer in simulation.peers.values() if peer.plan.acts is None]
        for peer in honest if records_found else []:
            assert peer.node is not None
            for key in keys:
                began = simulation.now()
                assert await peer.node.dht.get(key) is not None, peer.name
                seconds.append(simulation.now() - began)

    report, _ = run_with(kind, seed=1, afterwards=afterwards)
    assert report["violations"] == []
    assert max(seconds, default=0.0) < 4.0, "a silent peer holds nobody up"


def test_a_third_lies_and_the_run_goes_on() -> None:
    report = simulate("byzantine", seed=4)
    assert report["violations"] == []
    assert report["figures"]["policies"] > report["figures"]["policies_before"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50, 54))
def test_byzantine(seed: int) -> None:
    result = run_seed("byzantine", None, seed)
    assert result.violations == []


LATE_SECONDS = 5.0
"""Delay with which a forgetful validator makes its verdicts durable."""


async def append_late(
    self: TrustedPart, verdict_at: Callable[[int], Verdict], right: Any = TrustedPart.append_verdict
) -> Envelope:
    """Announce a verdict before it is durable."""

    async def later() -> None:
        await trio.sleep(LATE_SECONDS)
        await right(self, verdict_at)

    verdict = verdict_at(self._log.size())
    assert self._gossip._nursery is not None
    self._gossip._nursery.start_soon(later)
    return await self._seal(verdict, VERDICT_LIFETIME_SECONDS)


BUGS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "only signed weights are loaded": (swarm.wire.envelope, "verify", lambda *_: True),
    "a verdict is never forgotten": (TrustedPart, "append_verdict", append_late),
    # A resumed trainer forgets the submissions that its state has consumed.
    "a rollout is trained on once": (AcceptedSubmissions, "remember_consumed", lambda *_: 0),
}
"""By the invariant that finds each: where it is planted, and what stands there instead."""
SEEDS_TRIED = 20
"""Of `byzantine`, until one finds it: which one does changes with every change of the code."""


@pytest.mark.slow
@pytest.mark.parametrize("invariant", sorted(BUGS))
def test_bugs_planted_on_purpose_are_found_and_replayed(
    invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*BUGS[invariant])
    seed, report = next(
        (seed, report)
        for seed in range(1, SEEDS_TRIED + 1)
        if (report := simulate("byzantine", seed=seed))["violations"]
        and invariant in report["violations"][0]
    )
    assert report["led_there"] and report["virtual_seconds"] > 0
    again = simulate("byzantine", seed=seed)
    assert again["trace_hash"] == report["trace_hash"]
    assert again["violations"] == report["violations"]
    monkeypatch.undo()
    assert simulate("byzantine", seed=seed)["violations"] == []
