"""What `swarm doctor` finds for a worker: a screen, and a sentence for each problem."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import trio
from msgspec.structs import replace

from peers.engines import demo
from peers.engines.doctor import machine
from peers.environments.registry import class_of
from peers.inference.doctor import findings
from swarm.jobs.inference import Surveyed
from swarm.run.findings import Work
from swarm.run.run import Run
from swarm.settings import PeerSettings
from swarm.wire.manifest import EnvironmentReference, Thresholds
from tests.commands.harness import swarm
from tests.ledger.harness import OWNER, TRAINER
from tests.network.harness import manifest, sealed_manifest


@pytest.mark.slow
def test_one_screen_about_this_machine_and_a_policy(tmp_path: Path) -> None:
    policy, home = tmp_path / "policy", tmp_path / "home"
    demo.make_policy(policy, seed=1)
    outcome = swarm("doctor", "--home", home, "--model", policy)
    assert outcome.status == 0, outcome.errors
    topics = [line.split()[0] for line in outcome.output.splitlines()]
    assert topics[-6:] == ["engine", "device", "memory", "model", "space", "uplink"]
    assert not home.exists(), "it leaves nothing behind"
    found = {
        each["topic"]: each
        for each in json.loads(swarm("doctor", "--home", home, "--model", policy, "--json").output)
    }
    assert found["engine"]["name"] == "native"
    assert found["model"]["slots"] > 1
    assert not any(each["problem"] for each in found.values())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_what_is_missing_is_one_sentence(tmp_path: Path) -> None:
    config = tmp_path / "peer.toml"
    config.write_text('[inference]\ndevice = "cuda"\n')

    def said(*arguments: str | Path) -> str:
        outcome = swarm("doctor", "--home", tmp_path / "home", *arguments)
        assert outcome.status == 1
        return outcome.output

    cuda = said("--config", config)
    assert (
        "engine     PROBLEM: engine: device 'cuda' is not on this machine; there are: cpu" in cuda
    )
    assert "config.json cannot be read" in said("--model", tmp_path)


@pytest.mark.parametrize(
    ("measured", "dtype", "advised"),
    [
        (["bfloat16", "float32"], "float32", False),
        (["bfloat16", "float32"], "float16", True),
        ([], "float16", False),
    ],
)
def test_a_precision_that_the_run_did_not_measure_is_advised_against(
    measured: list[str], dtype: str, advised: bool
) -> None:
    thresholds = Thresholds(measured_tokens=1000 * len(measured), measured_dtypes=measured)
    message = replace(manifest([TRAINER], [TRAINER]), thresholds=thresholds)
    run = Run(sealed_manifest(OWNER, message))
    found = Surveyed(
        engine="native", engine_version="1", torch_version="2", device="cpu",
        device_title="a processor", dtype=dtype, threads=1, free_bytes=1 << 30,
    )  # fmt: skip
    device = next(each for each in machine(found, Work(run)) if each.topic == "device")
    assert device.advice == advised and not device.problem
    assert ("measured bfloat16 and float32 alone" in device.text) == advised


@pytest.mark.slow
def test_a_policy_is_loaded_beside_tasks_that_the_user_allowed(tmp_path: Path) -> None:
    policy, rows = tmp_path / "policy", tmp_path / "rows.jsonl"
    demo.make_policy(policy, seed=1)
    rows.write_text('{"prompt": "1>", "answer": "1"}\n' * 4)
    version = class_of("dataset").version
    task = EnvironmentReference(name="dataset", version=version, options={"path": str(rows)})
    work = Work(
        Run(sealed_manifest(OWNER, replace(manifest([TRAINER], [TRAINER]), environments=[task])))
    )
    settings = PeerSettings(home=str(tmp_path / "home"), environments=["dataset"])
    found = {each.topic: each for each in trio.run(findings, settings, work, str(policy))}
    assert "model" in found and not found["engine"].problem, found
    refused = settings.model_copy(update={"environments": []})
    (engine,) = [e for e in trio.run(findings, refused, work, str(policy)) if e.topic == "engine"]
    assert engine.problem and "stranger" in engine.text
