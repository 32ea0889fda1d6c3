"""A home keeps to the owner whose run it joined first, whatever a bootstrap peer shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import UserError
from swarm.run.choice import check_joined, choose_run, joined_runs, pin_owner, terms
from swarm.run.manifest import run_id
from swarm.run.run import Run
from swarm.wire.identity import Identity
from tests.commands.harness import bootstrap_peer, signed_manifest
from tests.ledger.harness import InlineDisk
from tests.network.harness import manifest, sealed_manifest

OWNER, THIEF = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)


def test_of_several_runs_the_one_joined_before_is_chosen(tmp_path: Path) -> None:
    listed = [signed_manifest(tmp_path, OWNER, name) for name in ("first", "second")]
    listed.append(signed_manifest(tmp_path, THIEF, "first"))
    with pytest.raises(UserError, match="knows several runs; choose one with --run"):
        choose_run(listed, None)
    assert choose_run(listed, None, {"first": OWNER.peer_id}) is listed[0]
    assert choose_run(listed, None, {"first": THIEF.peer_id}) is listed[2]
    assert choose_run(listed, "second", {"first": OWNER.peer_id}) is listed[1]


@pytest.mark.wall_clock
async def test_the_owner_is_pinned_once(tmp_path: Path) -> None:
    mine, other = signed_manifest(tmp_path, OWNER), signed_manifest(tmp_path, THIEF)
    disk = InlineDisk(tmp_path)
    assert await pin_owner(disk, mine) and not await pin_owner(disk, mine)
    assert await joined_runs(disk) == {"test": OWNER.peer_id}
    with pytest.raises(UserError, match=f"is signed by {THIEF.peer_id}, but you joined it bef"):
        await pin_owner(disk, other)
    elsewhere = run_id(signed_manifest(tmp_path, THIEF, "elsewhere"))
    with pytest.raises(UserError, match=f"shows run {elsewhere}, and this home has joined"):
        await check_joined(disk, elsewhere, None)
    await check_joined(disk, elsewhere, elsewhere)


def test_terms_are_plain_lines_whatever_the_owner_writes() -> None:
    envelope = sealed_manifest(OWNER, manifest([THIEF], []))
    lines = terms(Run(envelope))
    assert all(line.isprintable() for line in lines)
    assert [line.split()[0] for line in lines] == ["run", "tasks", "work", "admission"]


def started(home: Path, address: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "swarm.peer", "--role", "relay", "--home", str(home)]
    command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--bootstrap", address, "--json-logs", *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


@pytest.mark.slow
def test_a_peer_shows_what_it_joins_first_and_refuses_another_owner(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("mine", "theirs")]
    manifests = [tmp_path / "mine.manifest", tmp_path / "theirs.manifest"]
    manifests[0].write_bytes(signed_manifest(tmp_path / "model", OWNER, "mine").raw)
    manifests[1].write_bytes(signed_manifest(tmp_path / "model", THIEF, "theirs").raw)
    home = tmp_path / "home"
    with bootstrap_peer(homes[0], manifests[0]) as address, started(home, address) as peer:
        assert peer.stdout is not None
        events: list[dict[str, Any]] = []
        while not events or events[-1]["event"] != "peer.run_pinned":
            events.append(json.loads(peer.stdout.readline()))
        peer.kill()
    assert events[-1]["owner"] == OWNER.peer_id
    assert any("sort-digits 1" in line for line in events[-1]["lines"])
    with bootstrap_peer(homes[1], manifests[1]) as address:
        with started(home, address) as peer:
            _, errors = peer.communicate(timeout=60)
        assert peer.returncode == 2
        assert f"this home has joined {OWNER.peer_id}/mine; give --bootstrap of that" in errors
