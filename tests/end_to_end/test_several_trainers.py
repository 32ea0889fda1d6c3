"""Trainers in processes of their own: some are killed within their inner steps; strangers join."""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import trio

from peers.demo.setup import Setting, free_ports, write_config
from peers.engines.demo import make_policy
from peers.outer.rating import weights
from swarm.run.update import sign_manifest
from swarm.wire.envelope import open_envelope
from swarm.wire.identity import Identity, load_or_create
from swarm.wire.manifest import Limits, Optimiser, Outer, TrustedKey
from swarm.wire.outer import RoundRecord
from swarm.world.process import FORK_SERVER_VARIABLE
from tests.end_to_end.harness import START_SECONDS, STEP_SECONDS, Peer, tiny_manifest

pytestmark = pytest.mark.wall_clock

ROUNDS = 3
OUTER = Outer(rounds=ROUNDS, inner_steps=3, deadline_seconds=STEP_SECONDS)
TEXT = "\n".join(f"the {n % 10} small birds sing {n * 3 % 10} songs." for n in range(60))


def make_peers(
    folder: Path,
    fork_server: Path,
    outer: Outer = OUTER,
    table: Callable[[Path], dict[str, Setting]] = lambda home: {},
    trainers: int = 2,
    text_of_data: str = TEXT,
    strangers: Sequence[str] = (),
    learning_rate: float = 1e-3,
) -> list[Peer]:
    """A bootstrap peer, some trainers, and strangers, which run these modules. `table` gives
    further settings of one with a home."""
    model, text, manifest_path = folder / "model", folder / "birds.txt", folder / "run.manifest"
    make_policy(model, seed=3)
    text.write_text(text_of_data)
    peers: list[Peer] = []
    modules = ["swarm.peer"] * (1 + trainers) + list(strangers)
    ports = iter(free_ports(2 * len(modules)))
    for number, module in enumerate(modules):
        name = f"replica-{number}" if number else "bootstrap"
        home = folder / name
        home.mkdir(mode=0o700)
        role, port = name.partition("-")[0], next(ports)
        command = [sys.executable, "-m", module, "--role", role, "--home", str(home)]
        command += ["--listen", f"/ip4/127.0.0.1/tcp/{port}", "--bulk-port", str(next(ports))]
        command += ["--json-logs"]
        if role == "bootstrap":
            command += ["--manifest", str(manifest_path)]
        else:
            settings: dict[str, Setting] = {"model": str(model), "data": [str(text)]}
            settings |= {"sequence_tokens": 33, "batch_sequences": 4, **table(home)}
            write_config(home / "settings.toml", role, settings)
            command += ["--config", str(home / "settings.toml")]
            command += ["--bootstrap", peers[0].multiaddr]
        identity = load_or_create(home / "identity.key")
        variables = {FORK_SERVER_VARIABLE: str(fork_server)}
        peers.append(
            Peer(name, command, variables, role=role, identity=identity, home=home, port=port)
        )
    names = [peer.identity.peer_id for peer in peers[1 : trainers + 1]]
    manifest = msgspec.structs.replace(
        tiny_manifest(model, trainer=names[0], validators=names, steps=1, limits=Limits()),
        trainers=[TrustedKey(peer=name) for name in names],
        optimiser=Optimiser(learning_rate=learning_rate, warmup_steps=1),
        outer=outer,
    )
    envelope = sign_manifest(Identity(bytes([7]) * 32), manifest, time.time())
    manifest_path.write_bytes(envelope.raw)
    return peers


@pytest.mark.slow
async def test_a_trainer_killed_in_its_round_ends_with_the_same_model(
    tmp_path: Path, fork_server: Path
) -> None:
    bootstrap, *trainers = make_peers(tmp_path, fork_server)
    async with trio.open_nursery() as nursery:
        bootstrap.start(nursery)
        await bootstrap.says("peer.listening", seconds=START_SECONDS)
        for peer in trainers:
            peer.start(nursery)
        for peer in trainers:
            await peer.says("outer.merged", round=1, seconds=START_SECONDS)
        await trainers[1].kill()
        trainers[1].start(nursery)
        for peer in trainers:
            await peer.says("outer.run_complete", seconds=START_SECONDS + 2 * STEP_SECONDS)
        nursery.cancel_scope.cancel()
    check_states(trainers)
    assert model_of(trainers[0]) == model_of(trainers[1])


@pytest.mark.slow
async def test_a_trainer_that_is_alone_trains_to_the_end(tmp_path: Path, fork_server: Path) -> None:
    """As two ranks of `torchrun`, both of which end."""
    bootstrap, trainer, _ = make_peers(tmp_path, fork_server)
    as_ranks(trainer)
    async with trio.open_nursery() as nursery:
        bootstrap.start(nursery)
        await bootstrap.says("peer.listening", seconds=START_SECONDS)
        trainer.start(nursery)
        status = await trainer.ended(2 * START_SECONDS + STEP_SECONDS)
        assert (status, trainer.left_behind) == (0, set()), trainer.complaints
        assert model_of(trainer)
        nursery.cancel_scope.cancel()


@pytest.mark.long
async def test_of_two_strangers_the_honest_one_weighs_and_noise_does_not(
    tmp_path: Path, fork_server: Path
) -> None:
    lines = [
        f"line {n * 7919 % 1000} has {n % 7} {chr(97 + n % 26)} and no more." for n in range(900)
    ]
    outer = Outer(
        rounds=8,
        inner_steps=8,
        admission="scored",
        grace_seconds=STEP_SECONDS,
        deadline_seconds=4 * STEP_SECONDS,
    )
    bootstrap, *replicas = make_peers(
        tmp_path,
        fork_server,
        outer,
        lambda home: {"validation_sequences": 16},
        trainers=3,
        text_of_data="\n".join(lines),
        strangers=["swarm.peer", "tests.end_to_end.noisy_stranger"],
        learning_rate=3e-3,
    )
    honest, noisy = replicas[3:]
    async with trio.open_nursery() as nursery:
        bootstrap.start(nursery)
        await bootstrap.says("peer.listening", seconds=START_SECONDS)
        for peer in replicas:
            peer.start(nursery)
        for peer in replicas:
            await peer.says("outer.run_complete", seconds=START_SECONDS + 8 * STEP_SECONDS)
        nursery.cancel_scope.cancel()
    (last,) = {each.heard("outer.run_complete")[0]["state"] for each in replicas}
    assert last
    with closing(sqlite3.connect(replicas[0].home / "outer.sqlite")) as database:
        rows = database.execute("SELECT envelope FROM records ORDER BY round").fetchall()
    records = [open_envelope(raw).expect(RoundRecord) for (raw,) in rows]
    weighed = weights(records[-1].rated)
    assert weighed[honest.identity.peer_id] > 0.9, [record.rated for record in records]
    assert weighed.get(noisy.identity.peer_id, 0.0) == 0.0
    listed = [{each.trainer for each in record.contributions} for record in records]
    assert honest.identity.peer_id in listed[-1]
    assert noisy.identity.peer_id not in set().union(*listed)
    refused = [
        event["reason"]
        for peer in replicas[:3]
        for event in peer.heard("outer.contribution_refused", trainer=noisy.identity.peer_id)
    ]
    assert any("raises the loss" in each or "gain no more" in each for each in refused)


@pytest.mark.long
async def test_fourteen_trainers_of_which_three_are_killed_end_with_the_same_model(
    tmp_path: Path, fork_server: Path
) -> None:
    """INTELLECT-1's number of trainers; each merges a fourteenth of the parameters."""
    rounds, patience = 12, 20 * STEP_SECONDS
    outer = Outer(rounds=rounds, inner_steps=3, deadline_seconds=patience, shards=14)
    bootstrap, *trainers = make_peers(tmp_path, fork_server, outer, trainers=14)
    async with trio.open_nursery() as nursery:
        bootstrap.start(nursery)
        await bootstrap.says("peer.listening", seconds=START_SECONDS)
        for peer in trainers:
            peer.start(nursery)
        for number, victim in enumerate(trainers[1::5]):
            await victim.says("outer.merged", seconds=patience, round=2 * number + 1)
            await victim.kill()
            victim.start(nursery)
        for peer in trainers:
            await peer.says("outer.run_complete", seconds=patience)
        nursery.cancel_scope.cancel()
    check_states(trainers)
    assert max(len(event["trainers"]) for event in trainers[0].heard("outer.merged")) == 14
    assert len({model_of(peer, rounds) for peer in trainers}) == 1


def check_states(trainers: Sequence[Peer]) -> None:
    """After equal records all hold equal states."""
    states = {
        (event["record"], event["state"])
        for peer in trainers
        for event in peer.heard("outer.merged")
    }
    assert len({record for record, _ in states}) == len(states)


def model_of(peer: Peer, round_number: int = ROUNDS) -> bytes:
    return (peer.home / "outer" / f"model-{round_number}" / "model.safetensors").read_bytes()


def as_ranks(peer: Peer) -> None:
    """Set a trainer's command to `torchrun --nproc-per-node 2 -m swarm.peer --role replica …`."""
    python, _, module, *flags = peer.command
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    peer.command = [python, "-m", *launch, "-m", module, *flags]
    peer.environment = {**peer.environment, "OMP_NUM_THREADS": "1"}
