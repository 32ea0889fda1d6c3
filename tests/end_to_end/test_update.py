"""An owner changes a run in progress as the README says, and all peers continue."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from peers.learning.settings import learning_rate
from swarm.wire.identity import load_or_create
from swarm.wire.manifest import RunManifest
from tests.end_to_end.harness import STEP_SECONDS, Event, Swarm, swarm

NAMES = ("bootstrap", "relay", "trainer", "validator", "inference-1", "inference-2")
UNBLAMED = {"stale", "step"}
"""Checks that a late submission may fail."""


def toml(manifest: RunManifest) -> str:
    """Make the TOML file from which an owner would sign a manifest."""

    def shown(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return f'"{value}"' if isinstance(value, str) else str(value)

    def table(heading: str, struct: msgspec.Struct) -> list[str]:
        fields = {key: getattr(struct, key) for key in struct.__struct_fields__}
        shown_fields = (
            f"{key} = {shown(value)}"
            for key, value in fields.items()
            if value is not None and not isinstance(value, (bytes, dict, msgspec.Struct))
        )
        return [heading, *shown_fields]

    top, tables = [], []
    for name in manifest.__struct_fields__:
        value = getattr(manifest, name)
        if name in ("trainers", "validators"):
            top.append(f"{name} = {[key.peer for key in value]}")
        elif name == "environments":
            for each in value:
                tables += table("[[environments]]", each)
        elif isinstance(value, msgspec.Struct):
            tables += table(f"[{name}]", value)
        elif not isinstance(value, bytes):
            top.append(f"{name} = {shown(value)}")
    return "\n".join([*top, *tables]) + "\n"


async def update(peers: Swarm, base: Path, manifest: RunManifest, *more: str) -> str:
    """Run `swarm run update run.toml run.manifest`; return its output."""
    (peers.folder / "run.toml").write_text(toml(manifest))
    key = peers.folder / "owner.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_text((bytes([7]) * 32).hex())
        assert load_or_create(key).peer_id == peers.run.partition("/")[0]
    command = [sys.executable, "-m", "swarm.commands.main", "run", "update"]
    command += [str(peers.folder / "run.toml"), str(peers.folder / "run.manifest")]
    command += ["--owner-key", str(key), "--tokenizer", str(base), *more]
    done = await trio.run_process(
        command, capture_stdout=True, stderr=subprocess.STDOUT, check=False
    )
    assert done.stdout is not None
    assert done.returncode == 0, done.stdout.decode()
    return done.stdout.decode()


def changed(manifest: RunManifest, **tables: dict[str, Any]) -> RunManifest:
    new = {
        name: msgspec.structs.replace(getattr(manifest, name), **fields)
        for name, fields in tables.items()
    }
    return msgspec.structs.replace(manifest, version=manifest.version + 1, **new)


def check_rates(
    trained: list[Event], first: RunManifest, second: RunManifest, changed_at: int
) -> None:
    """Check that every step had the learning rate of the version that it follows.

    A step without a learning signal in any group has no learning rate.
    """
    taught = [event for event in trained if "learning_rate" in event]
    assert taught
    for event in taught:
        followed = second if event["step"] >= changed_at else first
        rate = learning_rate(followed.optimiser, followed.schedule.steps, event["step"])
        assert event["learning_rate"] == pytest.approx(rate), event["step"]


@pytest.mark.slow
def test_a_running_run_is_changed_as_the_readme_says(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, base, fork_server, names=NAMES, steps=2000) as peers:
            trainer = peers["trainer"]
            await peers.start()
            await trainer.says("trainer.step_trained", step=2)

            first = peers.manifest
            second = changed(
                first, sampling={"max_new_tokens": 9}, optimiser={"learning_rate": 3e-4}
            )
            told = await update(peers, base, second, "--bootstrap", peers["bootstrap"].multiaddr)
            assert "has it; the trusted peers ask there" in told
            since = {}
            for name in NAMES[1:]:
                signed = await peers[name].says("run.version_signed", version=2)
                assert any("max_new_tokens 8 → 9" in change for change in signed["changes"])
                in_force = await peers[name].says("run.version_in_force", version=2)
                since[name] = in_force["step"]
            assert len(set(since.values())) == 1
            changed_at = since["trainer"]
            await trainer.says("trainer.step_trained", step=changed_at + 3)
            check_rates(trainer.heard("trainer.step_trained"), first, second, changed_at)

            # A restarted peer knows the versions it needs, and the trainer follows the right one.
            for name in ("trainer", "validator", "inference-1"):
                await peers[name].kill()
                peers.restart(name)
            restarted = len(trainer.events)
            resumed = await trainer.says("trainer.resumed", since=restarted)
            # Enough steps for one of them to have a learning signal.
            await trainer.says("trainer.step_trained", step=resumed["step"] + 8)
            check_rates(trainer.heard("trainer.step_trained", restarted), first, second, changed_at)
            await peers["inference-1"].says("inference.receipt", outcome="accepted")

            # The other way: only sign, then restart the bootstrap peer with the new file.
            third = changed(second, schedule={"steps": 20})
            told = await update(peers, base, third)
            assert "or restart its bootstrap peer" in told
            await peers["bootstrap"].kill()
            peers.restart("bootstrap")
            over = await trainer.says("trainer.run_complete", seconds=2 * STEP_SECONDS)
            assert over["steps"] >= 20
            for name in ("trainer", "inference-1", "inference-2"):
                assert await peers[name].ended(30) == 0, peers[name].complaints

            for peer in peers.peers.values():
                assert peer.heard("membership.peer_evicted") == []
                assert peer.heard("run.version_refused") == []
                for verdict in peer.heard("validator.verdict"):
                    assert verdict["outcome"] == "accepted" or verdict["failed"] in UNBLAMED, (
                        verdict
                    )

    trio.run(main)
