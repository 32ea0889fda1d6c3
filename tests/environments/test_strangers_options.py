"""What a stranger's manifest may build on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peers.engines import demo
from peers.engines.doctor import task_of
from peers.engines.service import EngineService
from peers.environments.collection import Environments
from peers.environments.registry import BUILT_IN, class_of, load_named
from peers.environments.run_probe import probe_hashes
from peers.evaluation.service import EvaluationService
from peers.inference.settings import InferenceSettings
from peers.validator.inspector import InspectorService
from swarm.errors import UserError
from swarm.jobs.evaluation import EvaluationSetup
from swarm.jobs.inference import InferenceSetup
from swarm.jobs.validation import InspectionSetup
from swarm.run.allowed import ALLOWED_VARIABLE
from swarm.settings import PeerSettings
from swarm.wire.manifest import EnvironmentReference


@pytest.fixture(autouse=True)
def nothing_is_allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(ALLOWED_VARIABLE, "")
    yield


def hostile(tmp_path: Path) -> EnvironmentReference:
    """The environment of a manifest whose owner wants a program run here."""
    tasks, mark = tmp_path / "tasks.jsonl", tmp_path / "ran"
    tasks.write_text('{"question": "1 + 1", "answer": "2"}\n' * 4)
    return EnvironmentReference(
        name="harness",
        version=class_of("harness").version,
        weight=0.0,
        options={"path": str(tasks), "program": "/bin/sh", "arguments": ["-c", f"touch {mark}"]},
    )


def test_a_manifest_names_no_program_to_run_here(tmp_path: Path) -> None:
    reference = hostile(tmp_path)
    with pytest.raises(UserError, match="a run's owner is a stranger to this machine"):
        Environments([EnvironmentReference(name="sort-digits", version="1"), reference])
    found = task_of(reference)
    assert found.problem
    assert "SWARM_ENVIRONMENTS=harness" in found.text
    assert not (tmp_path / "ran").exists()


def test_no_reader_of_a_manifest_runs_its_program(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    demo.make_policy(policy, seed=1)
    attack = hostile(tmp_path)
    setup = EvaluationSetup(folder=str(policy), environments=[attack])
    for read in (
        lambda: EngineService(InferenceSetup(environments=[attack])),
        lambda: InspectorService(InspectionSetup(environments=[attack])),
        lambda: EvaluationService(setup),
        lambda: probe_hashes(policy, [attack]),  # of an eviction, or for a newer build
    ):
        with pytest.raises(UserError, match="a run's owner is a stranger to this machine"):
            read()
    assert not (tmp_path / "ran").exists()


def test_a_role_may_name_what_is_allowed() -> None:
    tables: dict[str, dict[str, Any]] = {
        "inference": {"environments": ["harness"]},
        "validator": {"threads": 2},
    }
    settings = PeerSettings(role=["inference"], environments=["dataset"], tables=tables)
    assert settings.allowed == ["dataset", "harness"]
    assert settings.of("inference", InferenceSettings).environments == ["harness"]


@pytest.mark.parametrize("name", ["dataset", "genesys"])
def test_no_stranger_learns_whether_a_file_exists(name: str, tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.write_text("{}\n")
    sentences = set()
    for path in (there, tmp_path / "missing.jsonl"):
        with pytest.raises(UserError) as caught:
            load_named(
                EnvironmentReference(
                    name=name, version=class_of(name).version, options={"path": str(path)}
                )
            )
        sentences.add(str(caught.value))
    assert len(sentences) == 1


@pytest.mark.parametrize(
    ("option", "sentence"), [("judge", "grades by a judge"), ("kept", "could run programs or read")]
)
def test_a_judge_or_a_file_needs_the_word_of_this_machines_user(option: str, sentence: str) -> None:
    reference = EnvironmentReference(name="sort-digits", version="1", options={option: "mine"})
    with pytest.raises(UserError, match=sentence):
        load_named(reference)


def test_shipped_environments_without_paths_and_programs_need_nothing() -> None:
    safe = {name for name in BUILT_IN if class_of(name).safe_for_strangers}
    assert safe == {"calculator", "code", "sort-digits", "tools"}
    assert load_named(EnvironmentReference(name="sort-digits", version="1")).name == "sort-digits"


def test_the_users_settings_allow_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = EnvironmentReference(name="dataset", version="9", options={"path": str(tmp_path)})
    with pytest.raises(UserError, match="stranger"):
        load_named(reference, ["harness"])
    with pytest.raises(UserError, match=r"no rows|holds no|lacks"):  # as far as its own checks
        load_named(reference, ["dataset"])
    assert "stranger" not in task_of(reference, ["dataset"]).text
    monkeypatch.setenv(ALLOWED_VARIABLE, "harness,dataset")
    assert "stranger" not in task_of(reference).text
