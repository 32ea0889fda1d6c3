"""The default backend's part of `benchmarks.outer_backends`: whole peers of a run."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import trio

from peers.demo.local_peers import Setting, free_ports, write_config
from peers.engines import model as policy_model
from peers.engines.demo import make_policy
from swarm.identity import Identity, load_or_create
from swarm.manifest import Limits, Optimiser, Outer, TrustedKey
from swarm.run.update import sign_manifest
from tests.end_to_end.harness import START_SECONDS, Peer, tiny_manifest

ROUND_SECONDS = 300.0
LAYERS_WIDE = 6
"""Layers of a model that is wider than the demo's: 20 million parameters at a width of 512."""


def make_model(folder: Path, hidden: int) -> None:
    """Save the demo's model, or a wider one with its tokenizer."""
    make_policy(folder, seed=3)
    if hidden == 96:
        return
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": LAYERS_WIDE,
        "layer_types": ["full_attention"] * LAYERS_WIDE,
        "num_key_value_heads": 4,
    }
    path.write_text(json.dumps(config))
    wide = folder.with_name("wide")
    wide.mkdir()
    policy_model.save(policy_model.random(folder, 3), wide, folder)
    shutil.rmtree(folder)
    wide.rename(folder)


def make_peers(folder: Path, options: argparse.Namespace, count: int) -> list[Peer]:
    """A bootstrap peer and `count` trainers."""
    model, text, manifest_path = folder / "model", folder / "birds.txt", folder / "run.manifest"
    make_model(model, options.hidden)
    text.write_text("\n".join(f"the {n % 10} birds sing {n * 3 % 10} songs." for n in range(500)))
    peers: list[Peer] = []
    ports = iter(free_ports(2 * count + 2))
    for number in range(count + 1):
        home = folder / f"peer-{number}"
        home.mkdir(mode=0o700)
        role, port = "replica" if number else "bootstrap", next(ports)
        command = [sys.executable, "-m", "swarm.peer", "--role", role, "--home", str(home)]
        command += ["--listen", f"/ip4/127.0.0.1/tcp/{port}", "--bulk-port", str(next(ports))]
        command += ["--json-logs"]
        if number:
            table: dict[str, Setting] = {"model": str(model), "data": [str(text)]}
            table |= {"sequence_tokens": 17, "batch_sequences": 1}
            write_config(home / "settings.toml", role, table)
            command += ["--config", str(home / "settings.toml")]
            command += ["--bootstrap", peers[0].multiaddr]
        else:
            command += ["--manifest", str(manifest_path)]
        identity = load_or_create(home / "identity.key")
        peers.append(Peer(home.name, command, {}, role=role, identity=identity, port=port))
    trainers = [peer.identity.peer_id for peer in peers[1:]]
    manifest = msgspec.structs.replace(
        tiny_manifest(model, trainer=trainers[0], validators=trainers, steps=1, limits=Limits()),
        trainers=[TrustedKey(peer=trainer) for trainer in trainers],
        optimiser=Optimiser(learning_rate=1e-3, warmup_steps=1),
        outer=Outer(rounds=options.rounds + 4, inner_steps=1),
    )
    manifest_path.write_bytes(sign_manifest(Identity(bytes([7]) * 32), manifest, time.time()).raw)
    return peers


async def measure_shardcast(
    options: argparse.Namespace, count: int, folder: Path, sent_bytes: Callable[[], int]
) -> dict[str, Any]:
    """Figures of the default backend with `count` trainers."""
    bootstrap, *trainers = make_peers(folder, options, count)

    async def merged(round_: int) -> None:
        for peer in trainers:
            await peer.says("outer.merged", round=round_, seconds=START_SECONDS + ROUND_SECONDS)

    async with trio.open_nursery() as nursery:
        bootstrap.start(nursery)
        await bootstrap.says("peer.listening", seconds=START_SECONDS)
        for peer in trainers:
            peer.start(nursery)
        await merged(1)
        before = sent_bytes()
        await merged(1 + options.rounds)
        moved = sent_bytes() - before
        found = {"trainers": count, **_timings(trainers, range(2, 2 + options.rounds))}
        found["bytes_per_trainer_and_round"] = moved / count / options.rounds
        if options.kill and count > 2:
            await trainers.pop().kill()
            begun = trio.current_time()
            newest = max(each["round"] for peer in trainers for each in peer.heard("outer.merged"))
            await merged(newest + 1)
            found["killed_seconds"] = trio.current_time() - begun
        nursery.cancel_scope.cancel()
    states = {(e["record"], e["state"]) for peer in trainers for e in peer.heard("outer.merged")}
    found["bit_equal"] = len({record for record, _ in states}) == len(states)
    return found


def _timings(trainers: list[Peer], rounds: range) -> dict[str, Any]:
    """Seconds from the last contribution of a round to the last merge."""
    seconds = []
    for round_ in rounds:
        given = [e["time"] for p in trainers for e in p.heard("outer.contributed", round=round_)]
        merged = [e["time"] for p in trainers for e in p.heard("outer.merged", round=round_)]
        if given and merged:
            seconds.append(max(merged) - max(given))
    return {"seconds": median(seconds), "seconds_least": min(seconds), "seconds_most": max(seconds)}
