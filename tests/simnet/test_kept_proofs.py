"""A worker keeps proofs of its own work, which outlast the entries in the validators' logs."""

from __future__ import annotations

import math
from functools import partial

import msgspec
import pytest
import trio

from peers.inference.proofs import SOON_SECONDS
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.ledger import proof_file
from swarm.ledger.log import Log
from swarm.ledger.proof_file import KEPT_PROOFS, Proven, proven_in
from swarm.wire.manifest import Limits, Thresholds
from swarm.world import Database
from tests.simnet.runs import SMALL, going

RUNNER = partial(run_virtual, seed=4)

VALIDATORS = ("v0", "v1")
EPOCH_ENTRIES = 400
"""About six minutes: longer than a worker takes to look for a seal."""
ROOM_BYTES = 60_000
SEALS = 5


def _database(simulation: Simulation, name: str, file: str) -> Database:
    return simulation.peers[name].disk.database(file)


def _proofs(database: Database) -> list[Proven]:
    names = database.read("SELECT DISTINCT submission FROM receipts ORDER BY submission")
    return [proven_in(database.read(KEPT_PROOFS, name)[0]) for name in names]


@pytest.mark.parametrize(
    "restarts",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.long)],
)
async def test_proofs_outlast_the_entries(restarts: bool) -> None:
    simulation = Simulation(4, workload=SMALL)
    sealed = {name: 0 for name in VALIDATORS}
    deleted: set[str] = set()

    def hear(_now: float, peer: Peer, event: Event) -> None:
        if event.name == "ledger.sealed" and peer.name in sealed:
            sealed[peer.name] += 1
        if event.name == "inference.proofs_deleted":
            deleted.add(peer.name)

    simulation.listeners.append(hear)
    narrow = {"inference": {"proofs_kept_bytes": ROOM_BYTES}}
    async with going(
        simulation,
        *(Plan(name, ["validator"]) for name in VALIDATORS),
        Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=8.0)),
        Plan("roomy", ["inference"]),
        Plan("narrow", ["inference"], tables=narrow),
        steps=1_000_000,
        limits=Limits(epoch_entries=EPOCH_ENTRIES),
        thresholds=Thresholds(stake_steps=1, measured_tokens=1),
    ):
        with trio.fail_after(20_000):
            while min(sealed.values()) < SEALS:
                await trio.sleep(300)
                if restarts:
                    await simulation.peers["roomy"].crash()
                    await simulation.peers["roomy"].start_again()

        _check(simulation)
    assert deleted == {"narrow"}


@pytest.mark.parametrize("end", ["the run ends", "it leaves", "the network dies"])
async def test_the_last_receipts_are_kept(end: str) -> None:
    simulation = Simulation(4, workload=SMALL)
    heard: list[tuple[float, bytes]] = []

    def hear(now: float, peer: Peer, event: Event) -> None:
        if event.name == "inference.receipt" and event.fields["log_index"] >= 0:
            heard.append((now, event.fields["submission"]))

    simulation.listeners.append(hear)
    over = simulation.expect("peer.work_over", ["w"])
    async with going(
        simulation,
        *(Plan(name, ["validator"]) for name in VALIDATORS),
        Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=2.0)),
        Plan("w", ["inference"]),
        steps=4 if end == "the run ends" else 1_000_000,
    ):
        worker, last = simulation.peers["w"], math.inf
        if end == "the run ends":
            assert await simulation.meet(over, 300)
        elif end == "it leaves":
            await trio.sleep(60)
            last = simulation.now()
            assert worker.node is not None
            worker.node.departure.ask()
            with trio.fail_after(60):
                await worker._over.wait()
        else:
            await trio.sleep(60)
            last = simulation.now() - 2 * SOON_SECONDS  # later ones may go with the network
            for name in ("trainer", *VALIDATORS):
                await simulation.peers[name].kill()
        kept = {each.receipt.verdict.submission for each in _proofs(
            _database(simulation, "w", "peer.sqlite"))}  # fmt: skip
        expected = {submission for when, submission in heard if when <= last}
        assert len(expected) > 2
        assert expected <= kept


def _check(simulation: Simulation) -> None:
    """All proofs hold, though the entries of most are gone."""
    logs: dict[str, Log] = {}
    for name in VALIDATORS:
        owner = simulation.identity(name).peer_id
        logs[owner] = Log(_database(simulation, name, "ledger.sqlite"), owner)
    kept = _proofs(_database(simulation, "roomy", "peer.sqlite"))
    assert all(proven.problem() is None for proven in kept)
    pruned = [p for p in kept if p.receipt.index < logs[p.receipt.envelope.sender].start()]
    assert len(pruned) > 20
    again = proof_file.read(msgspec.json.encode(proof_file.file_of(pruned[0])))
    assert again.receipt == pruned[0].receipt
    rows = _database(simulation, "narrow", "peer.sqlite").read("SELECT bytes FROM receipts")
    assert 0 < sum(size for (size,) in rows) <= ROOM_BYTES
