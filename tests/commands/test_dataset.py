"""`swarm dataset filter`: the kept tasks, resumption, and refused arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peers.engines.demo import make_policy
from peers.environments import load, split_of
from tests.commands.harness import Outcome, swarm


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_policy(folder, seed=1)
    return folder


def run(policy: Path, out: Path, *more: str, environment: str = "sort-digits") -> Outcome:
    return swarm(
        "dataset", "filter", "--policy", policy, "--environment", environment,
        "--pass-at", "2", "--max-new-tokens", "3", "--out", out, *more,
    )  # fmt: skip


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_it_goes_on_where_it_was_interrupted(policy: Path, tmp_path: Path) -> None:
    """It writes the same lines as without an interruption, even if the last line was cut off."""
    out, samples = tmp_path / "out.jsonl", tmp_path / "out.jsonl.samples.jsonl"
    assert run(policy, out, "--tasks", "40", "--keep", "0:0.5").status == 0
    through = out.read_bytes()
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join(lines[:8]) + lines[8][:20])
    out.unlink()
    done = run(policy, out, "--tasks", "40", "--keep", "0:0.5")
    assert done.status == 0 and "sort-digits: 7 of 80 samples\n" in done.errors
    assert "40 of 40 tasks are kept" in done.output  # random weights solve no task: share 0
    assert out.read_bytes() == through
    assert len({row["prompt"] for row in rows_of(out)}) == 40
    refused = run(policy, out, "--tasks", "40", "--seed", "1")
    assert refused.status == 2 and "holds samples of other settings" in refused.errors
    assert out.read_bytes() == through


@pytest.mark.slow
def test_passes_are_counted_by_the_environment(policy: Path, tmp_path: Path) -> None:
    """Claim the right answer in every other sample of the file."""
    out, samples = tmp_path / "out.jsonl", tmp_path / "out.jsonl.samples.jsonl"
    assert run(policy, out, "--tasks", "3").status == 0
    assert rows_of(out) == []
    head, *lines = samples.read_text().splitlines()
    found = [json.loads(line) for line in lines]
    for each in found:
        each["reward"] = float(each["row"] % 2)
    samples.write_text("\n".join([head, *map(json.dumps, found), ""]))
    assert run(policy, out, "--tasks", "3").status == 0
    rows = rows_of(out)
    assert [row["solve_rate"] for row in rows] == [0.5] * 3
    again = load("dataset", "1", {"path": str(out)})
    assert {again.task_of_row(n).prompt for n in range(3)} == {row["prompt"] for row in rows}  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_environment_takes_options(policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ("--option", "lengths=[3]", "--option", "prompt='{length}{prompt}'")
    done = run(policy, out, "--tasks", "2", "--keep", "0:1", *options)
    assert done.status == 0, done.errors
    rows = rows_of(out)  # of the environment's own tasks, without what the options add
    assert len(rows) == 2 and all(len(row["prompt"]) == 7 for row in rows)
    for more, words in (
        (("--option", "lengths=3]"), "write it as KEY=VALUE"),
        (("--option", "speed=1"), "unknown key"),
        (("--max-new-tokens", str(1 << 20)), "give a smaller --max-new-tokens"),
        (("--policy", "nowhere"), "--policy nowhere is no folder"),
    ):
        refused = run(policy, tmp_path / "other.jsonl", *more)
        assert refused.status == 2 and words in refused.errors, refused.errors


@pytest.mark.slow
def test_every_row_is_tried_once(policy: Path, tmp_path: Path) -> None:
    """With replacement, 100 draws of 40 rows would try some three times and some never."""
    data, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": f"{n:06}>", "answer": str(n), "more": [n]} for n in range(40)]
    data.write_text("\n".join(map(json.dumps, [*rows, {"prompt": "", "answer": ""}])))
    options = ["--option", f"path='{data}'", "--tasks", "100", "--keep", "0:1"]
    done = run(policy, out, *options, environment="dataset@1")
    assert done.status == 0, done.errors
    trained = [row for row in rows if split_of(str(row["prompt"])) == "train"]
    found = rows_of(out)
    assert found == [{**row, "solve_rate": 0.0} for row in trained] and 30 < len(found) < 40
    assert f"has no other prompts than these {len(found)}" in done.errors


def test_bounds_out_of_order_are_refused(policy: Path, tmp_path: Path) -> None:
    refused = run(policy, tmp_path / "out.jsonl", "--keep", "0.5:0.1")
    assert (
        refused.status == 2 and "--keep is '0.5:0.1'; it must be two numbers in" in refused.errors
    )


@pytest.mark.slow
def test_responses_are_records_of_genesys(policy: Path, tmp_path: Path) -> None:
    """What the filter writes, the environment `genesys` reads."""
    records = [
        {
            "problem_id": f"p{n}",
            "source": "sums",
            "task_type": "sum",
            "prompt": f"{n:06}>",
            "verification_info": json.dumps({"ground_truth": str(n)}),
            "gold_standard_solution": str(n),
        }
        for n in range(40)
    ]
    data, texts, out = (tmp_path / name for name in ("in.jsonl", "texts.jsonl", "out.jsonl"))
    data.write_text("\n".join(map(json.dumps, records)))
    options = [
        *("--option", f"path='{data}'", "--option", "verifiers={sum='exact'}"),
        *("--responses", str(texts), "--tasks", "3"),
    ]
    done = run(policy, out, *options, environment="genesys")
    assert done.status == 0, done.errors
    found = [json.loads(line) for line in texts.read_text().splitlines()]
    assert len(found) == 6 and len({each["response_id"] for each in found}) == 6
    for each in found:
        number = int(each["problem_id"][1:])
        assert each["prompt"] == f"{number:06}>" and each["source"] == "sums"
        assert json.loads(each["verification_info"]) == {"ground_truth": str(number)}
        assert each["score"] == 0 and isinstance(each["llm_response"], str)
        assert json.loads(each["generation_config"])["max_new_tokens"] == 3
    assert load("genesys", "1", {"path": str(texts), "verifiers": {"sum": "exact"}}).pins()


@pytest.mark.slow
def test_bad_rows_cost_themselves_and_are_named(policy: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{n}>", "answer": str(n)} for n in range(20)]
    rows[3] = {"prompt": "", "answer": "1"}
    rows[5] = {"prompt": "1\ud800", "answer": "1"}
    rows[7] = {"prompt": "1 2 3 " * 1000, "answer": "1"}
    rows[9] = {"prompt": "9>", "answer": float("nan")}
    for number in (11, 12, 13, 14):
        rows[number]["answer"] = "not a number"
    data, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    options = ["--option", f"path='{data}'", "--option", "grader='number'", "--tasks", "30"]
    options += ["--keep", "0:1", "--pass-at", "4", "--max-new-tokens", "24"]
    refused = run(policy, out, *options, environment="dataset")
    assert refused.status == 2 and not out.exists()
    assert "7 of 20 rows of dataset cannot be graded, more than the share --ungra" in refused.errors
    done = run(policy, out, *options, "--ungradable-max", "0.4", environment="dataset")
    assert done.status == 0, done.errors
    assert "8 rows and samples cannot be graded" in done.errors
    for kind in (
        "4 rows: the answer … holds no number",
        "1 row: the prompt is em",
        "1 row: … is nan",
    ):
        assert kind in done.errors, done.errors
    listed = rows_of(out.with_name("out.jsonl.samples.ungradable.jsonl"))
    for number in (3, 5, 7, 9, 11, 12, 13, 14):
        assert any(f"rows.jsonl: row {number}: " in each["problem"] for each in listed)
    kept = {row["prompt"].removesuffix(">") for row in rows_of(out)}
    assert len(kept) > 8 and not kept & {"3", "5", "7", "9", "11", "12", "13", "14"}
