"""Settings of a run with several trainers that cannot work: one sentence each."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from peers.outer.settings import ReplicaSettings
from simnet.clock import run_virtual
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.simulation import Plan, Simulation
from swarm.errors import UserError
from swarm.settings import PeerSettings
from swarm.terminal.tables import struct_from_mapping
from swarm.wire.manifest import Outer


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"momentum": 1.0}, "outer: momentum is 1.0: Expected `float` < 1.0"),
        ({"learning_rate": 0.0}, "outer: learning_rate is 0.0: Expected `float` > 0.0"),
        ({"deadline_seconds": 0.0}, "outer: deadline_seconds is 0.0: Expected `float` > 0.0"),
    ],
)
def test_a_manifest_with_a_wrong_number_is_not_signed(
    setting: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        struct_from_mapping(Outer, setting, "run.toml: outer")


def test_a_replica_without_model_says_so() -> None:
    with pytest.raises(UserError, match=r"set model under \[replica\]"):
        PeerSettings(role=["replica"]).of("replica", ReplicaSettings)


@pytest.mark.parametrize(
    ("rounds", "trainers", "sentence"),
    [
        (0, ["a"], "has no outer loop"),
        (1, ["other"], "must add that id to the manifest's trainers"),
    ],
)
def test_a_peer_that_cannot_be_a_replica_ends_with_a_sentence(
    rounds: int, trainers: list[str], sentence: str
) -> None:
    async def main() -> None:
        simulation = Simulation(1)
        async with simulation.running():
            outer = Outer(rounds=rounds)
            await start_bootstrap(simulation, trainers=trainers, validators=["v"], outer=outer)
            await simulation.add(Plan("a", ["replica"], SERVER)).start()
            await trio.sleep_forever()  # the end of a peer without a fault ends the simulation
        assert sentence in simulation.violations[0]

    run_virtual(main, seed=1, limit_seconds=1000.0)
