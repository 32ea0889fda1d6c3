"""A third party's package with an environment and an engine, installed as users do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

from peers.engines.demo import EOS_ID, make_policy
from peers.environments import Renderer, load, probe_hash, task_of
from peers.validator.cases import Outcome
from swarm.errors import UserError
from swarm.jobs import Hardware, Load
from swarm.jobs.inference import Generate, Generated, InferenceSetup, Loaded, Probe
from swarm.jobs.validation import Grade, Graded, Inspect, Inspected, InspectionSetup
from swarm.roles import check_tables
from swarm.rollouts.seeds import environment_of_group
from swarm.settings import PeerSettings
from swarm.wire.manifest import EnvironmentReference
from swarm.world.compute import LocalCompute
from tests.orders import ORDER, reference, submission_order

PACKAGE = '''
from typing import Annotated

import msgspec
import pydantic
import torch

from peers.engines.device import find_device
from peers.environments import Generated, SingleTurn, Task
from peers.engines.native import NativeEngine
from swarm.settings import RoleSettings


class Repeat(SingleTurn):
    """Asks for a digit, repeated."""

    name = "repeat"
    version = "2"
    safe_for_strangers = True

    class Options(msgspec.Struct):
        times: Annotated[int, msgspec.Meta(ge=1, le=6)] = 2

    def tasks(self):
        return Generated(self.make)

    def make(self, randomness):
        digits = f"{int.from_bytes(randomness[:4], 'big') % 10**6:06d}"
        return Task(prompt=digits + ">", answer=digits[0] * self.options.times)

    def grade(self, task, transcript):
        return float(transcript.finished and transcript.text == task.answer)


class Renamed(NativeEngine):
    """The native engine under another name, which says where it was made."""

    def __init__(self, folder, policy, hardware):
        super().__init__(folder, find_device(hardware.device), torch.bfloat16, policy)
        (folder / "made-by-lab").write_text(f"{hardware.device} {hardware.dtype} {policy}")


class Greeter:
    """A role with settings of its own."""

    topics = ()

    async def run(self):
        """Nothing to do."""

    class Settings(RoleSettings):
        words: str = pydantic.Field(default="hello", max_length=20)
'''

ENTRY_POINTS = """
[swarm.environments]
repeat = lab_package:Repeat
[swarm.engines]
lab-engine = lab_package:Renamed
[swarm.roles]
greeter = lab_package:Greeter
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on this process's search path in which the package is installed."""
    site = tmp_path / "site"
    info = site / "lab_package-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (site / "lab_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "lab_package", raising=False)
    return site


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    make_policy(folder, seed=0)
    return folder


def test_its_environment_takes_its_own_options(site: Path) -> None:
    assert task_of(load("repeat", "2"), b"a").answer in {2 * str(digit) for digit in range(10)}
    assert len(task_of(load("repeat", "2", {"times": 5}), b"a").answer) == 5
    for options, words in (
        ({"times": 9}, "options: times is 9: Expected `int` <= 6"),
        ({"often": 1}, "unknown key 'often'; there are: alpha, .*, times$"),
    ):
        with pytest.raises(UserError, match=words):
            load("repeat", "2", options)
    longer = task_of(load("repeat", "2", {"times": 3, "lengths": [4]}), b"a")
    assert len(longer.answer) == 3 and longer.target_length == 4


def test_its_role_has_a_table(site: Path) -> None:
    with pytest.raises(UserError, match=r"\[greeter\]: unknown key 'word'; there are: words"):
        check_tables(PeerSettings(role=["greeter"], tables={"greeter": {"word": "hi"}}))


@pytest.mark.slow
def test_its_engine_and_environment_serve_in_child_processes(
    site: Path, policy: Path, tmp_path: Path
) -> None:
    theirs = EnvironmentReference(name="repeat", version="2", options={"times": 3}, weight=2.0)
    environments = [reference(), theirs]
    order = submission_order(environments=environments, groups=8, stop_ids=[EOS_ID])
    hardware = Hardware(device="cpu", dtype="bfloat16")
    setup = InferenceSetup(engine="lab-engine", hardware=hardware, environments=environments)
    made_path, canonical = tmp_path / "made", tmp_path / "canonical"

    async def main() -> tuple[bytes, Generated, Outcome]:
        compute = LocalCompute()
        async with compute.child(
            "peers.engines.service:EngineService", setup, name="engine"
        ) as engine:
            await engine.request("load", Load(policy=ORDER.policy, folder=str(policy)), Loaded)
            probed = await engine.request("probe", Probe(environment=theirs), bytes)
            job = Generate(order=order, path=str(made_path))
            made = await engine.request("generate", job, Generated)
        async with compute.child(
            "peers.validator.inspector:InspectorService",
            InspectionSetup(environments=environments),
            name="inspector",
        ) as inspector:
            inspect = Inspect(
                order=order,
                path=str(made_path),
                digest=made.digest,
                canonical_path=str(canonical),
                tokenizer_folder=str(policy),
                bytes_max=1 << 20,
            )
            outcome = Outcome.of(await inspector.request("inspect", inspect, Inspected))
            assert not outcome.failed, outcome.detail
            outcome.settle(await inspector.request("grade", Grade(digest=made.digest), Graded))
            return probed, made, outcome

    probed, made, inspected = trio.run(main)
    assert (policy / "made-by-lab").read_text() == f"cpu bfloat16 {ORDER.policy.step}"
    assert probed == probe_hash(load("repeat", "2", {"times": 3}), Renderer(policy))
    assert made.groups == 8 and inspected.failed == ""
    drawn = [environment_of_group(order.seed(), group, [1.0, 2.0]) for group in range(8)]
    assert inspected.environments == drawn and 0 < sum(drawn) < 8
