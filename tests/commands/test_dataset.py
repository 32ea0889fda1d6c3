"""`swarm dataset filter`: the kept tasks, resumption, and refused arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio
from typer.testing import CliRunner

from peers.dataset.command import ResponseFile, parse_bounds
from peers.dataset.service import DatasetService
from peers.engines.demo import make_policy
from peers.environments import Grade, Transcript, grade, load, split_of, task_of
from peers.environments.listed import Listed
from peers.environments.sort_digits import SortDigits
from swarm.commands.main import app
from swarm.errors import UserError
from swarm.jobs.offline import Attempt, FilterSetup, MeasuredTask, MeasureTasks


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_policy(folder, seed=1)
    return folder


def run(policy: Path, out: Path, *more: str) -> Any:
    return CliRunner().invoke(
        app,
        [
            "dataset", "filter", "--policy", str(policy), "--environment", "sort-digits",
            "--pass-at", "2", "--max-new-tokens", "3", "--out", str(out), *more,
        ],
    )  # fmt: skip


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


@pytest.mark.slow
def test_it_goes_on_where_it_was_interrupted(policy: Path, tmp_path: Path) -> None:
    """It writes the same lines as without an interruption, even if the last line was cut off."""
    out = tmp_path / "out"
    assert run(policy, out, "--tasks", "40", "--keep", "0:0.5").exit_code == 0
    through = out.read_bytes()
    lines = through.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:8]) + lines[8][:20])
    done = run(policy, out, "--tasks", "40", "--keep", "0:0.5")
    assert done.exit_code == 0
    assert "40 of 40 tasks are kept" in done.output  # random weights solve no task: share 0
    assert "7 of 40 tasks tried" in done.output
    assert out.read_bytes() == through
    assert [row["index"] for row in rows_of(out)] == list(range(40))


@pytest.mark.slow
def test_the_environment_takes_options(policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--option", "lengths=[3]", "--option", "prompt='{length}{prompt}'")
    done = run(policy, out, "--tasks", "2", *options)
    assert done.exit_code == 0, done.output
    assert all(row["prompt"].startswith("3") and len(row["prompt"]) == 8 for row in rows_of(out))
    for text, words in (("lengths=3]", "write it as KEY=VALUE"), ("speed=1", "unknown key")):
        refused = run(policy, tmp_path / "other", "--option", text)
        assert refused.exit_code == 2 and words in refused.output, refused.output


@pytest.mark.slow
def test_other_settings_do_not_mix_in_one_file(policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(policy, out, "--tasks", "3").exit_code == 0
    assert not any(row["kept"] for row in rows_of(out))
    before = out.read_bytes()
    refused = run(policy, out, "--tasks", "3", "--seed", "1")
    assert refused.exit_code != 0
    assert "results of another policy, environment or setting" in refused.output
    assert out.read_bytes() == before


@pytest.mark.slow
def test_every_row_is_tried_once(policy: Path, tmp_path: Path) -> None:
    """With replacement, 100 draws of 40 rows would try some three times and some never."""
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows = [{"prompt": f"{n:06}>", "answer": str(n)} for n in range(40)]
    data.write_text("\n".join(map(json.dumps, [*rows, {"prompt": "", "answer": ""}])))
    options = ("--environment", "dataset", "--option", f"path='{data}'", "--tasks", "100")
    done = run(policy, out, *options)
    assert done.exit_code == 0, done.output
    trained = {row["prompt"] for row in rows if split_of(row["prompt"]) == "train"}
    found = [row["prompt"] for row in rows_of(out)]
    assert sorted(found) == sorted(trained) and 30 < len(found) < 40
    assert f"dataset has no other prompts than these {len(found)}" in done.output
    before = out.read_bytes()
    assert run(policy, out, *options).exit_code == 0 and out.read_bytes() == before


@pytest.mark.parametrize("text", ["", "0.5", "0.5:0.1", "-1:1", "0:2", "a:b", "nan:1"])
def test_bounds_out_of_order_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="two shares in order"):
        parse_bounds(text)
    assert parse_bounds("0.125:0.5") == (0.125, 0.5)


def test_passes_are_counted_by_the_environment(policy: Path, tmp_path: Path) -> None:
    """Make the engine give the environment's own answers, which must all pass."""
    service = DatasetService(
        FilterSetup(policy=str(policy), environment="sort-digits", version="1", options={})
    )
    job = MeasureTasks(
        seed=0, first=2, count=3, attempts=2, temperature=1.0, max_new_tokens=8, stop_ids=[2]
    )
    rows = trio.run(service.measure, job).rows
    assert [row.index for row in rows] == [2, 3, 4]
    assert [row.passes for row in rows] == [0, 0, 0]
    assert [task_of(SortDigits(), bytes.fromhex(row.seed)).prompt for row in rows] == [
        row.prompt for row in rows
    ]

    class Right(type(service._engine)):  # type: ignore[misc]
        def submit(self, request: Any) -> None:
            self.requests = {**getattr(self, "requests", {}), request.id: request}
            super().submit(request)

        def step(self) -> Any:
            made = super().step()
            for piece in made:
                request = self.requests[piece.id]
                if request.row % 2:
                    piece.tokens = [*sorted(request.tokens[1:7]), 2]
                    piece.log_probabilities = torch.zeros(7)
                    piece.spans, piece.hidden = [(0, 7)], piece.hidden[:1].expand(7, -1)
            return made

    service._engine.__class__ = Right
    rows = trio.run(service.measure, job).rows
    assert [row.passes for row in rows] == [1, 1, 1]


def test_an_environment_that_raises_is_named(policy: Path) -> None:
    class Broken(SortDigits):
        def grade(self, *_: Any) -> float:
            return 1 / 0

    service = DatasetService(
        FilterSetup(policy=str(policy), environment="sort-digits", version="1", options={})
    )
    service._environment = Broken()
    job = MeasureTasks(
        seed=0, first=0, count=1, attempts=1, temperature=1.0, max_new_tokens=3, stop_ids=[2]
    )
    with pytest.raises(UserError, match=r"'sort-digits' cannot grade .*ZeroDivisionError"):
        trio.run(service.measure, job)
    with pytest.raises(UserError, match="give a smaller --max-new-tokens"):
        trio.run(service.measure, msgspec.structs.replace(job, max_new_tokens=1 << 20))


def test_an_environment_of_the_kept_tasks(tmp_path: Path) -> None:
    out = tmp_path / "kept"
    rows = [
        {"seed": bytes([number]).hex(), "prompt": task_of(SortDigits(), bytes([number])).prompt}
        for number in range(6)
    ]
    lines = [json.dumps({**row, "kept": number > 1}) for number, row in enumerate(rows)]
    out.write_text("\n".join(["{}", *lines, ""]))
    listed = Listed(SortDigits(), out, "sort-kept")
    kept = {row["prompt"] for row in rows[2:]}
    drawn = {task_of(listed, bytes([number])).prompt for number in range(200)}
    assert drawn == kept
    assert task_of(listed, b"a", "held_out") == task_of(SortDigits(), b"a", "held_out")
    task = task_of(listed, b"a")
    assert grade(listed, task, Transcript.of(task.answer)) == Grade(1.0)
    out.write_text(out.read_text().replace('"kept": true', '"kept": false', 1))
    assert Listed(SortDigits(), out, "sort-kept").version != listed.version
    out.write_text("{}\n")
    with pytest.raises(UserError, match="keeps no task"):
        Listed(SortDigits(), out, "sort-kept")
    with pytest.raises(UserError, match="is no file of"):
        Listed(SortDigits(), tmp_path / "nothing", "sort-kept")


@pytest.mark.slow
def test_responses_are_records_of_genesys(policy: Path, tmp_path: Path) -> None:
    """What one filter writes, the environment `genesys` reads; a resumed file has no line twice."""
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
    data, texts, out = (tmp_path / name for name in ("in.jsonl", "texts.jsonl", "out"))
    data.write_text("\n".join(map(json.dumps, records)))
    options = [
        *("--environment", "genesys", "--option", f"path='{data}'"),
        *("--option", "verifiers=['sum=exact']", "--responses", str(texts)),
    ]
    assert run(policy, out, *options, "--tasks", "2").exit_code == 0
    first = texts.read_text()
    with texts.open("a") as file:
        file.write('{"cut off')
    done = run(policy, out, *options, "--tasks", "3")
    assert done.exit_code == 0, done.output
    assert texts.read_text().startswith(first)
    found = [json.loads(line) for line in texts.read_text().splitlines()]
    assert len(found) == 6 and len({each["response_id"] for each in found}) == 6
    for each in found:
        number = int(each["problem_id"][1:])
        assert each["prompt"] == f"{number:06}>" and each["source"] == "sums"
        assert json.loads(each["verification_info"]) == {"ground_truth": str(number)}
        assert each["score"] == 0 and isinstance(each["llm_response"], str)
        assert json.loads(each["generation_config"])["max_new_tokens"] == 3
    again = load("genesys", "1", {"path": str(texts), "verifiers": ["sum=exact"]})
    assert again.pins()


def test_a_file_of_responses_is_never_mixed_up(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    attempts = [Attempt(text="é\n", finished=True, reward=0.5)] * 2
    row = MeasuredTask(index=0, seed="ab", prompt="1>", answer="2", passes=0, responses=attempts)
    for kept in (0, 2):
        file = ResponseFile(path, kept, {"model_name": "m"})
        file.add(row)
        file.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and lines[:2] == lines[2:]
    assert json.loads(lines[0])["llm_response"] == "é\n"
    with pytest.raises(UserError, match=r"texts.jsonl exists; choose another file"):
        ResponseFile(path, 0, {})
    with pytest.raises(UserError, match=r"has fewer responses than the 5 attempts of --out"):
        ResponseFile(path, 5, {})
    with pytest.raises(UserError, match=r"cannot be written \(No such file"):
        ResponseFile(tmp_path / "nowhere" / "x", 0, {})


@pytest.mark.slow
def test_bad_rows_cost_themselves_and_are_named(policy: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{n}>", "answer": str(n)} for n in range(20)]
    rows[3] = {"prompt": "", "answer": "1"}
    rows[5] = {"prompt": "1\ud800", "answer": "1"}
    rows[7] = {"prompt": "1 2 3 " * 1000, "answer": "1"}
    rows[9] = {"prompt": "9>", "answer": float("nan")}
    for number in (11, 12, 13, 14):
        rows[number]["answer"] = "not a number"
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text("\n".join(map(json.dumps, rows)))
    done = CliRunner().invoke(
        app,
        [
            "dataset", "filter", "--policy", str(policy), "--environment", "dataset",
            "--option", f"path='{data}'", "--option", "grader='number'", "--tasks", "30",
            "--pass-at", "2", "--max-new-tokens", "3", "--out", str(out), "--keep", "0:1",
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "4 of 20 rows of dataset cannot be used, and are passed over" in done.output
    for number in (3, 5, 7, 9):
        assert f"rows.jsonl: row {number}" in done.output
    written = rows_of(out)
    bad = [row for row in written if row["problem"]]
    assert bad and not any(row["kept"] for row in bad)
    for row in bad:
        name = row["prompt"].removesuffix(">")
        assert f"rows.jsonl: row {name}: the answer" in row["problem"] and name in "11 12 13 14"
        assert f"task {row['index']} is not kept: environment 'dataset'" in done.output
    assert sum(row["kept"] for row in written) == len(written) - len(bad) > 8
