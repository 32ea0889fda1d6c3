"""Which solutions become examples, and the data set that they make."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies
from typer.testing import CliRunner

from peers.dataset.similar import shingles, similarity
from peers.engines.demo import make_policy
from peers.environments import Renderer, Task, load
from peers.environments.dataset import OfRows
from peers.evaluation.run import Evaluation, Measured
from peers.learning.examples import read_examples
from peers.models.find import Model
from peers.synthesis.responses import response
from peers.synthesis.sources import RunTasks, of_rollouts, of_samples
from peers.synthesis.write import Rules, Selection, Solution, write
from simnet.simulation import Simulation
from swarm.commands.main import app
from swarm.errors import UserError
from swarm.jobs.evaluation import PromptMessage, Sample, TasksDrawn
from swarm.jobs.offline import Reading
from swarm.look.rollouts.seen import SeenRollout, SeenSubmission, Turn
from swarm.wire.manifest import EnvironmentReference, RunManifest

RULES = Rules(
    reward=(1.0, math.inf), tokens=(1, math.inf), unfinished=False, per_task=2, similarity=0.8
)


def solution(**changed: Any) -> Solution:
    made = Solution(
        task=0,
        prompt="1+1=",
        text="2",
        tokens=2,
        reward=1.0,
        finished=True,
        kind="sums",
        contributor="worker",
        row={},
    )
    return replace(made, **changed)


def select(solutions: Iterable[Solution], **rules: Any) -> tuple[list[Solution], Selection]:
    selection = Selection(replace(RULES, **rules))
    return list(selection.of(solutions)), selection


@pytest.mark.parametrize(
    ("rules", "second", "reason"),
    [
        ({}, {"reward": 0.5, "text": "3"}, "outside --reward"),
        ({}, {"finished": False, "text": "3"}, "unfinished"),
        ({"tokens": (1, 9)}, {"tokens": 10, "text": "3"}, "outside --tokens"),
        ({}, {"task": 1, "text": " 2\n"}, "duplicates"),
        ({"per_task": 1}, {"text": "3"}, "beyond --per-task"),
        ({"similarity": 0.0}, {"text": "2 !"}, ""),
        ({"similarity": 0.4}, {"text": "a b c d e g"}, ""),
        ({"unfinished": True}, {"finished": False, "text": "3"}, ""),
        ({}, {"task": 1, "prompt": "0+2="}, ""),
        ({"question_similarity": 0.9}, {"task": 1, "prompt": "1 + 1 ="}, "beyond --question-simi"),
        ({"question_similarity": 0.9}, {"task": 0, "prompt": "1 + 1 =", "text": "3"}, ""),
    ],
)
def test_each_rule_leaves_out_what_it_names(
    rules: dict[str, Any], second: dict[str, Any], reason: str
) -> None:
    kept, selection = select([solution(), solution(**second)], **rules)
    assert len(kept) == (1 if reason else 2)
    assert [each[: len(reason)] for each in selection.left_out] == ([reason] if reason else [])


def test_solutions_that_say_the_same_are_too_similar() -> None:
    long = "first add one and one then write the sum which is two"
    one, other = shingles(long), shingles(long + " so 2")
    assert similarity(one, one) == 1 and similarity(one, shingles("no such words here")) == 0
    assert 0.7 < similarity(one, other) < 0.9
    kept, selection = select([solution(text=long), solution(text=long + " so 2")], similarity=0.5)
    assert len(kept) == 1 and selection.left_out == Counter(["beyond --similarity"])


@given(
    strategies.lists(
        strategies.builds(
            solution,
            task=strategies.integers(0, 3),
            prompt=strategies.sampled_from("pq"),
            text=strategies.text("ab ", max_size=12),
            reward=strategies.sampled_from([0.0, 1.0]),
            tokens=strategies.integers(1, 4),
            contributor=strategies.sampled_from("xy"),
            kind=strategies.sampled_from(["sums", "code"]),
        ),
        max_size=20,
    )
)
def test_every_solution_is_kept_or_counted(solutions: list[Solution]) -> None:
    selection = Selection(replace(RULES, tokens=(2, 3)))
    kept: list[Solution] = []
    try:
        kept.extend(selection.of(solutions))
    except UserError:
        assert not kept
    assert selection.solutions == len(solutions)
    assert selection.kept == len(kept) == len(solutions) - sum(selection.left_out.values())
    assert selection.tasks == len({each.task for each in kept})
    assert all(count <= 2 for count in Counter(each.task for each in kept).values())
    for name, credit in selection.credits.items():
        own = [each for each in kept if each.contributor == name]
        assert (credit.kept, credit.kept_tokens) == (len(own), sum(each.tokens for each in own))
    for count in ("solutions", "kept", "kept_tokens"):
        of_workers, of_kinds = (
            sum(getattr(each, count) for each in credits.values())
            for credits in (selection.credits, selection.kinds)
        )
        assert of_workers == of_kinds
    assert [each for each in kept if each not in solutions] == []


def drawn() -> TasksDrawn:
    return TasksDrawn(checkpoint="ab", engine="native", tasks=[2], max_new_tokens=8, stop_ids=[1])


def sample(row: int, prompt: list[PromptMessage], *turns: str, reward: float = 1.0) -> Sample:
    return Sample(
        environment=0,
        row=row,
        reward=reward,
        finished=True,
        tokens=3,
        turns=["".join(each.content for each in prompt), *turns],
        prompt=prompt,
    )


def solutions_of(teacher: Path, options: dict[str, Any], *samples: list[Sample]) -> list[Solution]:
    """Of samples of the tasks of a file of records."""
    wanted = Evaluation(
        environments=[EnvironmentReference(name="genesys", version="1", options=options)],
        split="train",
        tasks=len(samples),
        samples=len(samples[0]),
        temperature=1.0,
        max_new_tokens=8,
        stop_ids=[],
    )
    measured = Measured("teacher", drawn(), [list(samples)])
    return list(of_samples(measured, wanted, Model(teacher, str(teacher))))


def genesys(path: Path, *prompts: Any) -> dict[str, Any]:
    """Options of a file of records, none of which is held out."""
    rows = [
        {
            "problem_id": f"p{n}",
            "task_type": "sort",
            "in_source_id": n,
            "source": "s",
            "prompt": prompt,
            "verification_info": json.dumps({"ground_truth": "12"}),
            "metadata": {"level": 1},
        }
        for n, prompt in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"path": str(path), "verifiers": ['sort="exact"']}


PUBLISHED = [
    *("response_id", "problem_id", "source", "in_source_id", "hf_dataset_name", "task_type"),
    *("prompt", "gold_standard_solution", "llm_response", "verification_info", "score"),
    *("verification_result_info", "metadata"),
]
"""The columns of PrimeIntellect/SYNTHETIC-1, by its data card."""


def test_what_is_written_here_is_what_sft_learns(tmp_path: Path) -> None:
    teacher = tmp_path / "policy"
    make_policy(teacher, 0)
    options = genesys(tmp_path / "rows.jsonl", "21>", "12>")
    samples = [
        [sample(2 * n, asked, "12"), sample(2 * n + 1, asked, "21", reward=float(n))]
        for n, asked in enumerate([[PromptMessage("", "21>")], [PromptMessage("", "12>")]])
    ]
    found = solutions_of(teacher, options, *samples)
    write(found, Selection(RULES), tmp_path / "data", "local")
    examples, *_ = read_examples(tmp_path / "data", teacher, 99, Reading())
    decode = Renderer(teacher).decode_completion
    assert [decode(each.model_tokens, [2])[0][:2] for (each,) in examples] == ["12", "12", "21"]
    table = pq.read_table(tmp_path / "data/data")
    assert table.schema.names[:13] == PUBLISHED
    rows = table.to_pylist()
    assert len({row["response_id"] for row in rows}) == 3
    assert {(row["problem_id"], row["in_source_id"]) for row in rows} == {("p0", "0"), ("p1", "1")}
    for row in rows:
        assert json.loads(row["verification_info"]) == {"ground_truth": "12"}
        assert json.loads(row["metadata"]) == {"level": 1}
        assert (row["gold_standard_solution"], row["score"]) == ("12", 1.0)
        assert (row["task_type"], row["environment"], row["source"]) == ("sort", "genesys", "s")
        assert row["model_name"] == "policy@ab"
    credits = json.loads((tmp_path / "data/credits.json").read_text())
    assert credits == {"this machine": {"solutions": 4, "kept": 3, "kept_tokens": 9}}
    card = (tmp_path / "data/README.md").read_text()
    assert "3 of 4 solutions are kept" in card and "- sort: 3 of 4 solutions, 9 tokens" in card
    # The verifier of the record's task type can grade the data set again.
    again = load("genesys", "1", {**options, "path": str(tmp_path / "data")})
    assert isinstance(again, OfRows) and again.usable(0).prompt in ("21>", "12>")


@pytest.mark.parametrize(
    ("value", "kind"),
    [(5, "5"), (["a|b"], '["a|b"]'), (None, "sums"), ("<b>`x` [y](z)", "<b>`x` [y](z)")],
)
def test_records_of_others_hold_any_values(tmp_path: Path, value: Any, kind: str) -> None:
    data = dict.fromkeys(("problem_id", "source", "in_source_id", "task_type"), value)
    made = {"model_name": "m", "generation_config": {}, "machine_info": {}}
    record = response(
        Task("1+1=", "2", data), "sums", "n", sample="s", text="2", score=1.0, parts={}, made=made
    )
    found = solution(kind=record["task_type"], row=record)
    write([found], Selection(RULES), tmp_path / "data", "local")
    (row,) = pq.read_table(tmp_path / "data/data").to_pylist()
    assert row["task_type"] == kind
    assert row["problem_id"] == (kind if value else "n") and row["source"] in (kind, "")
    card = (tmp_path / "data/README.md").read_text()
    assert "<b>" not in card and "[y]" not in card


def test_chats_are_written_as_messages(tmp_path: Path) -> None:
    teacher = tmp_path / "policy"
    make_policy(teacher, 0)
    (teacher / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "1 or 2?"}]
    options = genesys(tmp_path / "rows.jsonl", chat)
    asked = [PromptMessage(**each) for each in chat]
    found = solutions_of(teacher, options, [sample(0, asked, "a", "more?", "b")])
    write(found, Selection(RULES), tmp_path / "data", "local")
    (row,) = pq.read_table(tmp_path / "data/data").to_pylist()
    assert (row["prompt"], row["llm_response"]) == ("1 or 2?", "amore?b")
    assert [(each["role"], each["content"]) for each in row["messages"]] == [
        ("system", "s"),
        ("user", "1 or 2?"),
        ("assistant", "a"),
        ("user", "more?"),
        ("assistant", "b"),
    ]
    with pytest.raises(UserError, match="answers the teacher's turns after a prompt of text"):
        solutions_of(teacher, options, [sample(0, [PromptMessage("", "p")], "a", "more?", "b")])


def seen(
    worker: str, reward: float | None, verdict: str = "accepted", text: str = "3"
) -> SeenRollout:
    origin = SeenSubmission("ab", "r", 0, 1, 0, worker, 0, "native", verdict, "", "")
    turns = [
        Turn("prompt", [5, 6], "21>", None, None, [], [], False),
        Turn("model", [7, 2], text, "stop", [-0.5, -0.5], [], [], True),
    ]
    return SeenRollout(
        origin=origin,
        group=0,
        sample=0,
        environment="sort-digits",
        environment_version="1",
        temperature=1.0,
        turns=turns,
        reward=reward,
        advantage=None,
        parts={},
        outcome=None,
        consumed_at=None,
    )


def test_a_runs_workers_are_credited_for_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks of data sets are found again by their prompts."""
    rollouts = [
        seen("ann", 1.0),
        seen("bob", 1.0, text="4"),
        seen("bob", 0.0),
        seen("eve", 1.0, "refused"),
        seen("eve", None, ""),
    ]
    selection = Selection(RULES)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "21>", "answer": "12"}\n{"prompt": 7}')
    monkeypatch.setenv("SWARM_ENVIRONMENTS", "dataset")
    make_policy(tmp_path / "policy", 0)
    renderer = Renderer(tmp_path / "policy")
    for each in rollouts:
        each.turns[0] = replace(each.turns[0], tokens=renderer.encode_prompt("21>"))
        text = each.turns[1].text or ""
        each.turns[1] = replace(each.turns[1], tokens=[*renderer.encode_completion(text), 2])
    missing, of_file = (
        EnvironmentReference(name="dataset", version="1", options={"path": str(path)})
        for path in (tmp_path / "gone.jsonl", tmp_path / "rows.jsonl")
    )
    run = Simulation(1).manifest(trainers=[], validators=[], environments=[missing, of_file])
    assert isinstance(run.message, RunManifest)
    tasks = RunTasks(run.message, renderer)
    (problem,) = tasks.problems
    assert "gone.jsonl is not on this machine" in problem and "lack verification_info" in problem
    write(of_rollouts(iter(rollouts), tasks), selection, tmp_path / "data", "run")
    assert {name: (each.kept, each.solutions) for name, each in selection.credits.items()} == {
        "ann": (1, 1),
        "bob": (1, 2),
    }
    rows = pq.read_table(tmp_path / "data/data").to_pylist()
    assert [(row["worker"], row["submission"]) for row in rows] == [("ann", "ab"), ("bob", "ab")]
    assert {(row["gold_standard_solution"], row["problem_id"][:12]) for row in rows} == {
        ("12", "sort-digits-")
    }
    with pytest.raises(UserError, match="give --tokenizer FOLDER"):
        list(of_rollouts(iter([seen("ann", 1.0)]), None))


def test_a_data_set_that_shrinks_to_nothing_is_a_sentence(tmp_path: Path) -> None:
    selection = Selection(RULES)
    sentence = "none of 2 solutions passes --reward 1: --tokens 1: .*2 outside --reward; widen"
    with pytest.raises(UserError, match=sentence):
        write([solution(reward=0.0)] * 2, selection, tmp_path / "data", "local")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give either --rollouts SOURCE or --model MODEL with --environment"),
        (["--model", "none", "--environment", "x"], "--model none is no folder"),
        (["--rollouts", ".", "--environment", "x"], "go with --model"),
        (["--model", ".", "--reward", "x"], "--reward is 'x'; it must be two numbers in order"),
        (["--model", "."], "give --environment NAME"),
        (["--model", ".", "--run-file", "none.toml"], "none.toml cannot be read (No such file"),
        (
            ["--model", ".", "--environment", "a", "--environment", "b", "--option", "x=1"],
            "give it with --run-file",
        ),
        (["--model", ".", "--question-similarity", "2"], "--question-similarity"),
    ],
)
def test_wrong_inputs_are_sentences(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["synthesize", "--out", "data", *arguments])
    assert result.exit_code == 2 and sentence in result.stderr


def test_existing_folders_are_kept(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    for out, words in (
        (tmp_path, "exists and is not an empty folder; choose another"),
        (tmp_path / "kept", "exists and is not an empty folder; choose another"),
        (tmp_path / "new.jsonl", "new.jsonl must name a folder without a suffix"),
        (tmp_path / "no/new", "cannot be written: there is no folder"),
    ):
        arguments = ["synthesize", "--out", str(out), "--model", str(tmp_path)]
        assert words in CliRunner().invoke(app, arguments).stderr


@pytest.mark.slow
def test_a_teacher_on_this_machine(tmp_path: Path) -> None:
    """The second command selects anew among the same solutions."""
    make_policy(tmp_path / "teacher", 0)
    arguments = ["synthesize", "--model", str(tmp_path / "teacher"), "--environment", "sort-digits"]
    arguments += ["--limit", "4", "--samples", "2", "--max-new-tokens", "4", "--reward", "0:"]
    arguments += ["--solutions", str(tmp_path / "all.jsonl"), "--unfinished", "--json"]
    said = []
    for out, extra in (("one", []), ("two", ["--per-task", "1"])):
        result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / out), *extra])
        assert result.exit_code == 0, result.output
        said.append(json.loads(result.stdout))
        assert pq.read_table(tmp_path / out / "data").num_rows == said[-1]["kept"]
    assert [each["solutions"] for each in said] == [8, 8]
    assert said[1]["kept"] == said[1]["tasks"] == 4
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 1 + 8
    for extra, sentence in (
        (["--temperature", "0.5"], f"{tmp_path / 'all.jsonl'} holds samples of other"),
        (["--option", "chat=true", "--solutions", "new.jsonl"], "has no chat template"),
    ):
        result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "three"), *extra])
        assert result.exit_code == 2 and sentence in result.stderr
    assert not (tmp_path / "three").exists() and not Path("new.jsonl").exists()
