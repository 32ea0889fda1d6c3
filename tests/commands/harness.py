"""Helpers that run commands as a person would and read what they print."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from peers.demo.recipes import ENVIRONMENT
from peers.demo.setup import demo_manifest
from peers.engines.demo import save_tokenizer
from peers.environments.run_probe import probe_hashes
from swarm.commands.main import app
from swarm.run.update import sign_manifest
from swarm.wire.envelope import Envelope
from swarm.wire.identity import Identity

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWKnDdG3iXw9eTFijk3EWSunZcFi54Zka4wmtqtt6rPxc8"


@dataclass(frozen=True)
class Outcome:
    status: int
    output: str
    errors: str


def swarm(*arguments: str | Path) -> Outcome:
    """Run the `swarm` command in this process."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError("a person would see a traceback") from result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def complaint(*arguments: str | Path) -> str:
    """Run a command that must fail with one sentence; return the sentence."""
    outcome = swarm(*arguments)
    assert outcome.status != 0, outcome.output
    assert outcome.output == ""
    *events, last = outcome.errors.strip().splitlines()
    harmless = re.compile(r"warning: |\S+ \S+ (new key: |listening on /ip|advice: )")
    assert all(harmless.match(line) for line in events), outcome.errors
    assert last.startswith("error: ")
    return last.removeprefix("error: ")


def signed_manifest(folder: Path, owner: Identity, name: str = "test", seed: int = 1) -> Envelope:
    """Sign the demo's run as `owner`; writes its tokenizer to `folder`."""
    save_tokenizer(folder)
    manifest = demo_manifest(
        name=name,
        steps=10,
        hashes=probe_hashes(folder, [ENVIRONMENT]),
        trainer=Identity(bytes([seed]) * 32).peer_id,
        validator=Identity(bytes([seed + 1]) * 32).peer_id,
    )
    return sign_manifest(owner, manifest, time.time())


@contextmanager
def bootstrap_peer(home: Path, *manifests: Path) -> Iterator[str]:
    """Run a bootstrap peer in a process of its own; yields its multiaddr."""
    command = [sys.executable, "-m", "swarm.peer", "--role", "bootstrap", "--home", str(home)]
    command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--json-logs"]
    for manifest in manifests:
        command += ["--manifest", str(manifest)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "peer.listening":
                    yield event["addresses"][0]
                    break
            else:
                raise AssertionError(f"it did not start: {process.stderr.read()}")
        finally:
            process.terminate()
            process.communicate(timeout=10)
