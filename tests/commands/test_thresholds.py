"""`swarm run create` measures thresholds with the run's model, keeps them, or the run observes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from peers.engines import demo
from swarm.run.manifest import load_manifest, manifest_in
from swarm.wire.manifest import Thresholds
from tests.commands.harness import swarm
from tests.commands.test_commands import RUN, create

MEASURED = """
[thresholds]
honest_margin = 0.004
margin_max = 2.5
measured_tokens = 16384
measured_dtypes = ["bfloat16", "float32"]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    demo.make_policy(folder, seed=1)
    return folder


@pytest.fixture
def lab(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    return Path(shutil.copytree(model, tmp_path / "lab"))


def signed(folder: Path) -> Thresholds:
    return manifest_in(load_manifest(folder / "run.manifest")).thresholds


def update(folder: Path, text: str, *more: str) -> list[str | Path]:
    (folder / "run.toml").write_text(text)
    keys = ("--owner-key", folder / "owner.key", "--tokenizer", folder)
    return ["run", "update", folder / "run.toml", *keys, *more]


def test_thresholds_are_measured_shown_and_signed(lab: Path) -> None:
    done = swarm(*create(lab), "--class", "float32", "--class", "bfloat16")
    assert done.status == 0, done.errors
    for row in ("float32 cpu → bfloat16 cpu", "bfloat16 cpu → float32 cpu", "[thresholds]"):
        assert row in done.errors
    found = signed(lab)
    assert found.measured_dtypes == ["bfloat16", "float32"]
    long = 4 * 16 * 4  # completions of all pairs, where they are long; here are more
    assert long * 8 < found.measured_tokens <= 4 * long * 8
    assert not found.observes
    assert 0 < found.honest_margin < 0.01 and found.stake_steps == Thresholds().stake_steps

    (lab / "run.manifest").unlink()
    shown = done.errors[done.errors.index("[thresholds]") :]
    again = swarm(*create(lab, f"{RUN}\n{shown}"))
    assert again.status == 0 and "measuring" not in again.errors, "what was shown can be pasted"
    assert signed(lab) == found

    kept = swarm(*update(lab, RUN.replace("version = 3", "version = 4")))
    assert kept.status == 0, kept.errors
    assert signed(lab) == found and "observe" not in kept.errors, "an update keeps them"


def test_a_run_that_leaves_measuring_out_observes_and_is_told_so(lab: Path) -> None:
    done = swarm(*create(lab), "--no-measure")
    assert done.status == 0
    assert signed(lab).observes
    assert "observe" in done.errors and "swarm run update" in done.errors
    later = swarm(*update(lab, RUN.replace("version = 3", "version = 4"), "--measure"))
    assert later.status == 0, later.errors
    assert not signed(lab).observes


def test_without_weights_a_run_observes(tmp_path: Path) -> None:
    done = swarm(*create(tmp_path))
    assert done.status == 0 and "has no weights to measure with" in done.errors
    assert signed(tmp_path).observes


def test_what_the_description_says_stays(lab: Path) -> None:
    stated = swarm(*create(lab, RUN + MEASURED))
    assert stated.status == 0 and "measuring" not in stated.errors
    assert signed(lab).measured_tokens == 16_384
    text = RUN.replace("version = 3", "version = 4")
    own = "\n[thresholds]\nmargin_max = 9.0\nstake_steps = 7\n"
    done = swarm(*update(lab, text + own))
    assert done.status == 0, done.errors
    found = signed(lab)
    assert (found.margin_max, found.honest_margin, found.stake_steps) == (9.0, 0.004, 7)
