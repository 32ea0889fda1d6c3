"""Workers with vLLM in a swarm whose validator recomputes with the native engine."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import trio

from peers.demo.recipes import ENVIRONMENT, Warmup
from peers.demo.warmup import warm_up
from peers.engines.demo import save_tokenizer
from peers.engines.vllm.selftest import make_tiny
from peers.environments import load
from tests.end_to_end.harness import REPOSITORY, STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts

pytestmark = pytest.mark.vllm

INSTALLED = REPOSITORY / "build/vllm/engines"
"""Where `make test-vllm` installs the engine; the peers' homes link to it."""

LOADED_SECONDS = 240.0
"""Deadline for vLLM's first policy on a busy machine: 10 s of processor time, and the check."""

STEPS = 10


def make_base(folder: Path) -> None:
    """A policy that sometimes sorts six digits, with heads that vLLM takes on a CPU."""
    make_tiny(folder, seed=0, hidden=128, tied=True, spread=0.02)
    save_tokenizer(folder)
    warm_up(folder, [load(ENVIRONMENT.name, ENVIRONMENT.version)], 0, Warmup(accuracy=0.05))


def test_native_and_vllm_workers_are_accepted_and_wrong_weights_refused(
    tmp_path: Path, fork_server: Path
) -> None:
    base = tmp_path / "base"
    make_base(base)

    async def main() -> None:
        workers = ["inference-native", "inference-vllm", "inference-altered"]
        names = ["bootstrap", "trainer", "validator", *workers]
        settings = {"inference-altered": {"alter_weights": 0.1}}
        folder = tmp_path / "swarm"
        async with swarm(
            folder, base, fork_server, names=names, steps=STEPS, settings=settings
        ) as peers:
            for name in workers[1:]:
                peer = peers[name]
                (peer.home / "engines").symlink_to(INSTALLED)
                peer.command = [*peer.command, "--engine", "vllm"]
            await peers.start(*(name for name in names if name != workers[0]))
            native, vllm, altered = (peers[name] for name in workers)
            await vllm.says("inference.policy_loaded", seconds=LOADED_SECONDS)
            # Without a pause vLLM may finish the ten steps before the native worker has joined.
            vllm.send(signal.SIGSTOP)
            await peers.start(native.name)
            await native.says("inference.receipt", outcome="accepted")
            vllm.send(signal.SIGCONT)
            refused = await altered.says(
                "inference.receipt", outcome="refused", seconds=LOADED_SECONDS
            )
            assert refused["failed"] in ("proofs", "sampling", "margins", "activations")
            await peers.complete(STEPS * STEP_SECONDS)
            for peer in (native, vllm):
                assert await peer.ended(30) == 0, peer.complaints
                assert peer.heard("inference.receipt", outcome="accepted")
                assert not peer.heard("inference.receipt", outcome="refused")
            agreed = vllm.heard("compute.child_said", name="engine")
            assert any("vllm agrees with the native engine" in each["line"] for each in agreed)
            totals = check_accounts(peers).state.totals
            for peer in (native, vllm):
                assert totals[peer.identity.peer_id].accepted > 0
                assert totals[peer.identity.peer_id].refused == 0
            assert totals[altered.identity.peer_id].accepted == 0
            print({peer.name: totals[peer.identity.peer_id] for peer in (native, vllm, altered)})

    trio.run(main)
