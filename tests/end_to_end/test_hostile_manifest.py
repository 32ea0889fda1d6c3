"""A hostile owner's manifest names a program: no command and no worker runs it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import pytest
import trio

from peers.environments.registry import class_of
from swarm.run.allowed import ALLOWED_VARIABLE
from swarm.run.links import Link, make_link
from swarm.run.update import sign_manifest
from swarm.wire.identity import Identity
from swarm.wire.manifest import EnvironmentReference
from tests.end_to_end.harness import START_SECONDS, STEP_SECONDS, Person, Swarm, swarm

REFUSAL = "a run's owner is a stranger to this machine"


def make_hostile(peers: Swarm, mark: Path) -> None:
    """Sign the run again, with an environment that makes the file `mark`. The owner's own peers
    allow it, and are spared."""
    tasks = peers.folder / "tasks.jsonl"
    tasks.write_text('{"question": "1 + 1", "answer": "2"}\n' * 40)
    attack = EnvironmentReference(
        name="harness",
        version=class_of("harness").version,
        weight=0.0,
        probe_hash=peers.manifest.environments[0].probe_hash,
        options={
            "path": str(tasks),
            "program": "/bin/sh",
            "arguments": ["-c", f'test -n "$SPARED" || touch {mark}'],
        },
    )
    manifest = msgspec.structs.replace(
        peers.manifest, environments=[*peers.manifest.environments, attack]
    )
    envelope = sign_manifest(Identity(bytes([7]) * 32), manifest, time.time())
    (peers.folder / "run.manifest").write_bytes(envelope.raw)
    for peer in peers.peers.values():
        peer.environment = {
            **peer.environment,
            "SPARED": "1",
            ALLOWED_VARIABLE: f"{peers.manifest.environments[0].name},harness",
        }


@pytest.mark.slow
def test_no_process_runs_a_program_that_a_manifest_names(
    tmp_path: Path, base: Path, fork_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"

    monkeypatch.setenv(ALLOWED_VARIABLE, "sort-digits,harness")

    async def main() -> None:
        names = ["bootstrap", "trainer", "validator"]
        async with swarm(tmp_path / "swarm", base, fork_server, names=names, steps=1000) as peers:
            make_hostile(peers, mark)
            await peers.start()
            await peers["trainer"].says("trainer.step_opened", seconds=START_SECONDS)
            address = peers["bootstrap"].multiaddr
            commands = [
                ("swarm.peer", "--role", "inference", "--bootstrap", address),
                ("swarm.commands.main", "join", make_link(Link(peers.run, (address,)))),
                ("swarm.commands.main", "doctor", "--bootstrap", address),
            ]
            for number, arguments in enumerate(commands):
                home = tmp_path / f"home-{number}"
                home.mkdir()
                victim = Person(
                    " ".join(arguments[:2]),
                    [sys.executable, "-m", *arguments],
                    {"HOME": str(home), ALLOWED_VARIABLE: ""},
                )
                victim.start(peers.nursery)
                status = await victim.ended(START_SECONDS)
                said = "\n".join([*victim.output, *victim.complaints])
                assert status in (1, 2) and not mark.exists()
                assert said.count(REFUSAL) == 1 and "Traceback" not in said
            trusting = peers.person("trusting", *commands[0][1:], home=tmp_path)
            await trusting.ended(STEP_SECONDS)  # its user trusts every owner
            print(trusting.complaints)
            assert mark.exists(), "the program would have left its mark"

    trio.run(main)
