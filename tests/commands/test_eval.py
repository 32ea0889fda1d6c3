"""`swarm eval`: tables, JSON, resumption, and refused arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peers.engines.demo import make_policy
from peers.evaluation.samples import open_samples
from swarm.commands.main import app
from swarm.errors import UserError
from swarm.jobs.evaluation import Sample

RUN = """
name = "mixture"
model = "base"
[sampling]
stop_ids = [2]
max_new_tokens = 8
temperature = 0.7
[[environments]]
name = "sort-digits"
version = "1"
[[environments]]
name = "sort-digits"
version = "1"
options = {lengths = [8], prompt = "{length}{prompt}"}
"""


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["eval", "--model", *map(str, arguments)])


def sample(row: int, reward: float = 1.0) -> Sample:
    return Sample(environment=0, row=row, reward=reward, finished=True, tokens=2, turns=["a", "b"])


@pytest.mark.slow
def test_an_evaluation_is_resumed_and_compared(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_policy(tmp_path / f"policy{seed}", seed=seed)
    out, run_file = tmp_path / "out.jsonl", tmp_path / "run.toml"
    run_file.write_text(RUN)
    arguments = (
        tmp_path / "policy1", "--run-file", run_file, "--limit", 5, "--samples", 2, "--out", out,
    )  # fmt: skip
    first = run(*arguments, "--pass-at", "1,2")
    assert first.exit_code == 0, first.output
    assert "pass@2" in first.output and "sort-digits-1" in first.output
    assert "0.0 [0.0, 43.4]" in first.output  # Wilson's, for 0 of 5 tasks
    whole = out.read_text().splitlines(keepends=True)
    head = json.loads(whole[0])
    assert len(whole) == 21
    assert (head["temperature"], head["max_new_tokens"], head["stop_ids"]) == (0.7, 8, [2])
    out.write_text("".join(whole[:9]) + whole[9][:20])
    found = run(*arguments, "--base", tmp_path / "policy2", "--json")
    assert found.exit_code == 0, found.output
    assert out.read_text().startswith("".join(whole[:9]))
    assert sorted(out.read_text().splitlines()) == sorted(line.strip() for line in whole)
    report = json.loads(found.stdout)
    assert report["checkpoint"]["hash"] != report["base"]["hash"]
    figures = report["checkpoint"]["environments"]["sort-digits-1"]
    assert figures["pass_at"]["1"]["method"] == "wilson" and figures["tasks"] == 5
    assert report["difference"]["sort-digits-0"]["reward"]["value"] == 0.0
    other = run(tmp_path / "policy2", *arguments[1:])
    assert other.exit_code == 2 and "another checkpoint" in other.output
    hotter = run(*arguments, "--temperature", 1)
    assert hotter.exit_code == 2
    assert "temperature is 0.7 there and 1.0 here; choose another file" in hotter.output


def test_samples_survive_a_torn_line_and_other_checkpoints_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with open_samples(path, {"checkpoint": "aa", "seed": 0}) as file:
        for row in range(3):
            file.append(sample(row))
        with (
            pytest.raises(UserError, match="being written by another"),
            open_samples(path, {"checkpoint": "aa", "seed": 0}),
        ):
            pass
    raw = path.read_bytes()
    path.write_bytes(raw[:-5])
    with open_samples(path, {"checkpoint": "aa", "seed": 0}) as file:
        assert file.samples == [sample(0), sample(1)]
        file.append(sample(2))
    assert path.read_bytes() == raw
    for head, words in (
        ({"checkpoint": "bb", "seed": 0}, "samples of another checkpoint"),
        ({"checkpoint": "aa", "seed": 1}, "seed is 0 there and 1 here"),
    ):
        with pytest.raises(UserError, match=words), open_samples(path, head):
            pass
    path.write_bytes(raw + b"{}\n")
    with (
        pytest.raises(UserError, match="line 5 is no sample"),
        open_samples(path, {"checkpoint": "aa", "seed": 0}),
    ):
        pass
    path.write_text("notes\n")
    with (
        pytest.raises(UserError, match="is no file of samples"),
        open_samples(path, {"checkpoint": "aa"}),
    ):
        pass
    with pytest.raises(UserError, match="cannot be written"), open_samples(tmp_path, {}):
        pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --environment NAME"),
        (["--environment", "sort-digits"] * 2, "--environment names one twice (sort-digits, so"),
        (["--environment", "sort-digits", "--pass-at", "4"], "raise it to at least 4"),
        (["--environment", "sort-digits", "--pass-at", "0"], "must be positive integers"),
        (["--environment", "sort-digits", "--pass-at", "some"], "must be positive integers"),
        (["--environment", "sort-digits", "--samples", "2", "--greedy"], "omit one of the two"),
        (["--environment", "sort-digits", "--temperature", "0"], "--temperature is 0; it must be"),
        (["--environment", "sort-digits", "--temperature", "nan"], "--temperature is nan; it must"),
        (["--run-file", "RUN", "--temperature", "0"], "--temperature is 0; it must be above 0"),
        (["--environment", "sort-digits", "--split", "test"], "must be held_out or train"),
        (["--environment", "sort-digits", "--set", "dtype=int8"], "dtype is 'int8'"),
        (
            ["--environment", "a", "--environment", "b", "--option", "x=1"],
            "--option is for one environment",
        ),
        (["--environment", "a", "--option", "x"], "write it as KEY=VALUE"),
        (["--environment", "chess", "--run-file", "RUN"], "'chess', which"),
        (["--run-file", "RUN", "--option", "x=1"], "exclude each other"),
        (["--run-file", "nothing.toml"], "nothing.toml cannot be read"),
        (["--environment", "sort-digits", "--base", "nothing"], "--base nothing is no folder"),
        (["--environment", "sort-digits", "--engine", "vllm"], "engine 'vllm' is not installed in"),
        (["--environment", "sort-digits", "--out", "/nowhere/x"], "there is no folder /nowhere"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    given = [str(tmp_path / "run.toml") if each == "RUN" else each for each in arguments]
    refused = run(tmp_path, *given, "--home", tmp_path)
    assert refused.exit_code == 2
    assert words in refused.output, refused.output
