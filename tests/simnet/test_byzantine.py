"""Adversaries are caught or harmless, and bugs planted on purpose are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from simnet.campaign import run_seed
from simnet.faults import Crash
from simnet.planted import BUGS, check_plant
from simnet.scenarios import Scenario, load, mixed
from simnet.simulate import simulate
from simnet.simulation import Peer, Plan, Simulation
from swarm.errors import UserError
from swarm.events import Event
from swarm.run.records import peer_key, run_key

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

    scenario = Scenario(
        "one liar", "", PEERS, PEERS, run, load("mixed").weather,
        mixed.WORKLOAD,
    )  # fmt: skip
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
    result, _ = run_seed("byzantine", None, seed, None)
    assert result.violations == []


FOUND_BY = {
    "skipped-signature-check": "only signed weights are loaded",
    "forgotten-verdict": "a verdict is never forgotten",
    "trained-twice": "a rollout is trained on once",
}
"""The invariant that finds a planted bug."""
SEEDS_TRIED = 20
"""Of `byzantine`, until one finds it: which one does changes with every change of the code."""


@pytest.mark.slow
@pytest.mark.parametrize("bug", sorted(BUGS))
def test_all_planted_bugs_are_found_and_replayed(bug: str) -> None:
    seed = _find(bug)
    assert simulate("byzantine", seed=seed)["violations"] == []


def _find(bug: str) -> int:
    """The first seed in which the invariant that it breaks is the first to speak."""
    seed, report = next(
        (seed, report)
        for seed in range(1, SEEDS_TRIED + 1)
        if (report := simulate("byzantine", seed=seed, plant=bug))["violations"]
        and FOUND_BY[bug] in report["violations"][0]
    )
    assert report["led_there"] and report["virtual_seconds"] > 0
    again = simulate("byzantine", seed=seed, plant=bug)
    assert again["trace_hash"] == report["trace_hash"]
    assert again["violations"] == report["violations"]
    return seed


def test_an_unknown_bug_is_one_sentence() -> None:
    with pytest.raises(UserError, match="'gremlin' is unknown; choose one of: skipped-signature"):
        check_plant("gremlin")
