"""`swarm dataset filter`: the kept tasks, resumption, and refused arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peers.engines.demo import make_policy
from peers.environments import Transcript, grade, load, split_of, task_of
from peers.environments.interface import UnusableTask
from swarm.errors import UserError
from tests.commands.harness import Outcome, swarm
from tests.commands.test_impossible_runs import MEASURED, describe


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_policy(folder, seed=1)
    return folder


def run(policy: Path, out: Path, *more: str, environment: str = "sort-digits") -> Outcome:
    return swarm(
        "dataset", "filter", "--model", policy, "--environment", environment,
        "--samples", "2", "--max-new-tokens", "3", "--out", out, *more,
    )  # fmt: skip


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_it_goes_on_where_it_was_interrupted(policy: Path, tmp_path: Path) -> None:
    """It writes the same lines as without an interruption, even if the last line was cut off."""
    out, samples = tmp_path / "out.jsonl", tmp_path / "out.jsonl.samples.jsonl"
    assert run(policy, out, "--limit", "40", "--solve-rate", "0:0.5").status == 0
    through = out.read_bytes()
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join(lines[:8]) + lines[8][:20])
    out.unlink()
    done = run(policy, out, "--limit", "40", "--solve-rate", "0:0.5")
    assert done.status == 0 and "sort-digits: 7 of 80 samples\n" in done.errors
    assert "40 of 40 tasks are kept" in done.output  # random weights solve no task: share 0
    assert out.read_bytes() == through
    assert len({row["prompt"] for row in rows_of(out)}) == 40
    refused = run(policy, out, "--limit", "40", "--seed", "1")
    assert refused.status == 2 and "holds samples of other settings" in refused.errors
    assert out.read_bytes() == through


@pytest.mark.slow
def test_passes_are_counted_by_the_environment(policy: Path, tmp_path: Path) -> None:
    """Claim the right answer in every other sample of the file."""
    out, samples = tmp_path / "out.jsonl", tmp_path / "out.jsonl.samples.jsonl"
    assert run(policy, out, "--limit", "3").status == 0
    assert rows_of(out) == []
    head, *lines = samples.read_text().splitlines()
    found = [json.loads(line) for line in lines]
    for each in found:
        each["reward"] = float(each["row"] % 2)
    samples.write_text("\n".join([head, *map(json.dumps, found), ""]))
    assert run(policy, out, "--limit", "3").status == 0
    rows = rows_of(out)
    assert [row["solve_rate"] for row in rows] == [0.5] * 3
    again = load("dataset", "1", {"path": str(out)})
    assert {again.task_of_row(n).prompt for n in range(3)} == {row["prompt"] for row in rows}  # type: ignore[attr-defined]
    kept = load("sort-digits", "1", {"kept": str(out), "lengths": [3]})
    drawn = [task_of(kept, bytes([n])) for n in range(40)]
    assert {task.own.prompt for task in drawn} == {row["prompt"] for row in rows}
    assert grade(kept, drawn[0], Transcript.of(drawn[0].answer)).reward == 1
    held_out = task_of(kept, bytes(32), "held_out")
    assert held_out == task_of(load("sort-digits", "1", {"lengths": [3]}), bytes(32), "held_out")
    # What is kept of the kept ones is a subset.
    option = ("--option", f"kept='{out}'")
    done = run(policy, tmp_path / "again.jsonl", "--limit", "9", "--solve-rate", "0:1", *option)
    assert "3 of 3 tasks are kept" in done.output, done.errors
    assert {row["prompt"] for row in rows_of(tmp_path / "again.jsonl")} == {
        row["prompt"] for row in rows
    }


@pytest.mark.slow
def test_the_environment_takes_options(policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ("--option", "lengths=[3]", "--option", "prompt='{length}{prompt}'")
    done = run(policy, out, "--limit", "2", "--solve-rate", "0:1", *options)
    assert done.status == 0, done.errors
    rows = rows_of(out)  # of the environment's own tasks, without what the options add
    assert len(rows) == 2 and all(len(row["prompt"]) == 7 for row in rows)
    for more, words in (
        (("--option", "lengths=3]"), "write it as KEY=VALUE"),
        (("--option", "speed=1"), "unknown key"),
        (("--max-new-tokens", str(1 << 20)), "give a smaller --max-new-tokens"),
        (("--model", "nowhere"), "--model nowhere is no folder"),
    ):
        refused = run(policy, tmp_path / "other.jsonl", *more)
        assert refused.status == 2 and words in refused.errors, refused.errors


@pytest.mark.slow
def test_every_row_is_tried_once(policy: Path, tmp_path: Path) -> None:
    """With replacement, 100 draws of 40 rows would try some three times and some never."""
    data, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": f"{n:06}>", "answer": str(n), "more": [n]} for n in range(40)]
    data.write_text("\n".join(map(json.dumps, [*rows, {"prompt": "", "answer": ""}])))
    options = ["--option", f"path='{data}'", "--limit", "100", "--solve-rate", "0:1"]
    done = run(policy, out, *options, environment="dataset@1")
    assert done.status == 0, done.errors
    trained = [row for row in rows if split_of(str(row["prompt"])) == "train"]
    found = rows_of(out)
    assert found == [{**row, "solve_rate": 0.0} for row in trained] and 30 < len(found) < 40
    assert f"has no other prompts than these {len(found)}" in done.errors


def test_bounds_out_of_order_are_refused(policy: Path, tmp_path: Path) -> None:
    refused = run(policy, tmp_path / "out.jsonl", "--solve-rate", "0.5:0.1")
    assert (
        refused.status == 2
        and "--solve-rate is '0.5:0.1'; it must be two numbers in" in refused.errors
    )


def test_a_run_pins_its_kept_tasks(tmp_path: Path) -> None:
    """`filter → run`: the hash of the file is in the manifest, and another file is refused."""
    kept = tmp_path / "kept.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": f"{n:06}>", "answer": f"{n:06}", "data": {}} for n in range(90)
    ]
    bad: list[dict[str, Any]] = [{"prompt": 7}, {"answer": None}, {"data": [1]}]
    kept.write_text("\n".join(map(json.dumps, [*lines, *({**lines[0], **each} for each in bad)])))
    arguments = describe(tmp_path, MEASURED.replace(
        '[sampling]', f'options = {{kept = "{kept}"}}\n\n[sampling]'
    ))  # fmt: skip
    done = swarm(*arguments)
    assert done.status == 0, done.errors
    assert "3 of 93 rows of sort-digits cannot be used" in done.errors
    for words in (
        "row 90: the prompt in 'prompt' is 7",
        "row 91: 'answer' is None",
        "row 92: 'data'",
    ):
        assert words in done.errors
    environment = load("sort-digits", "1", {"kept": str(kept)})
    pinned = environment.pins()["kept_hash"]
    assert str(pinned).encode() in (tmp_path / "run.manifest").read_bytes()
    with pytest.raises(UnusableTask, match="row 90"):
        environment.cached_tasks.at(90)  # type: ignore[attr-defined]
    kept.write_text(json.dumps(lines[0]))
    with pytest.raises(UserError, match=r"but the option kept_hash is .* give kept_hash ="):
        load("sort-digits", "1", {"kept": str(kept), "kept_hash": pinned})
    kept.write_text('{"prompt": "1>"}')
    with pytest.raises(UserError, match="options: kept names the column 'answer', which"):
        load("sort-digits", "1", {"kept": str(kept)})


WORDS = [f"word{n}" for n in range(400)]


def test_rows_are_selected_by_their_prompts(tmp_path: Path) -> None:
    data, exam, out = (tmp_path / name for name in ("in.jsonl", "exam.jsonl", "out.jsonl"))
    texts = [" ".join(WORDS[start : start + 30]) for start in range(0, 390, 30)]
    changed = texts[1].replace("word59", "another")
    rows: list[dict[str, Any]] = [
        *({"q": text, "level": 1} for text in texts),
        {"q": f" {texts[0]}  ", "level": 1},
        {"q": changed, "level": 1},
        {"q": "short", "level": 1},
        {"q": "\u8bd5 \u9898 " * 12, "level": 1},
        {"q": [{"role": "user", "content": "a chat " * 9}], "level": 1},
        {"q": [{"role": "user"}, {"content": "no chat " * 9}], "level": 1},
        {"q": "level two " * 9, "level": 2},
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    exam.write_text(json.dumps({"task": f"Answer this: {texts[4]} now"}))
    done = swarm(
        "dataset", "select", "--out", out,
        "--apart-from", f"{{path = '{exam}', columns = {{prompt = 'task'}}}}",
        "--option", f"path='{data}'", "--option", "columns={prompt='q', answer=''}",
        "--option", "where={level=1, 'length(q)'='20:', 'script(q)'='latin'}",
    )  # fmt: skip
    assert done.status == 0, done.errors
    kept = [{"q": text, "level": 1} for text in texts if text != texts[4]]
    assert rows_of(out) == [*kept, rows[17]]
    for part in (
        "13 of 17 rows are kept", "1 duplicates", "1 near duplicates", "1 like --apart-from",
        "1 unusable",
    ):  # fmt: skip
        assert part in done.output
    assert f"{data}: row 4 is like {exam}: row 0 (0." in done.errors
    again = swarm("dataset", "select", "--out", out, "--option", f"path='{exam}'")
    assert again.status == 2 and "names the column 'prompt'" in again.errors
    assert len(rows_of(out)) == 13
    broken = swarm("dataset", "select", "--out", out, "--apart-from", "{path", "--option",
                   f"path='{data}'", "--option", "columns={prompt='q', answer=''}")  # fmt: skip
    assert "write it as KEY=VALUE in TOML" in broken.errors
    lacking = swarm("dataset", "select", "--out", out, "--option", f"path='{exam}'",
                    "--option", "columns={prompt='nothing'}")  # fmt: skip
    assert lacking.status == 2 and not out.with_suffix(".part").exists()


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
    options = ["--option", f"path='{data}'", "--option", "grader='number'", "--limit", "30"]
    options += ["--solve-rate", "0:1", "--samples", "4", "--max-new-tokens", "24"]
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


@pytest.mark.slow  # ten seconds to load its models
def test_rows_of_some_languages_are_chosen(tmp_path: Path) -> None:
    data, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    texts = [
        "What is the sum of three and five?", "Was ist die Summe von drei und fünf?",
        "Quelle est la somme de trois et cinq ?", "三加五等于多少？", "12 + 5 =",
        "What is the sum of ten and five? " * 70 + "Das Ende ist deutsch und viel länger. " * 300,
    ]  # fmt: skip
    data.write_text("\n".join(json.dumps({"q": each}) for each in texts))
    given = ("--option", f"path='{data}'", "--option", "columns={prompt='q', answer=''}")
    where = "where={'language(q)'=['en', 'zh']}"
    done = swarm("dataset", "select", "--out", out, *given, "--option", where)
    assert done.status == 0, done.errors
    assert rows_of(out) == [{"q": texts[0]}, {"q": texts[3]}, {"q": texts[5]}]
