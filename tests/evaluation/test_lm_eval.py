"""lm-eval itself, with local data and no network: run by `make test-lm-eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peers.engines.demo import make_policy
from swarm.commands.main import app
from tests.docs.pages import ROOT

pytestmark = pytest.mark.lm_eval

PYTHON = ROOT / "build/lm-eval/bin/python"

SORTING = """
task: sorting
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/sorting.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{digits}}}}>"
doc_to_target: "{{{{sorted}}}}"
generation_kwargs: {{until: [">"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOICE = """
task: choosing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{data}.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{digits}}}}>"
doc_to_choice: ["{{{{sorted}}}}", "{{{{digits}}}}"]
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_local_tasks_are_evaluated_and_resumed(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy", seed=1)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "sorting.yaml").write_text(SORTING.format(folder=tmp_path))
    (tasks / "choosing.yaml").write_text(CHOICE.format(folder=tmp_path, data="sorting"))
    missing = CHOICE.format(folder=tmp_path, data="nothing").replace("choosing", "missing")
    (tasks / "missing.yaml").write_text(missing)
    documents = [{"digits": each, "sorted": "".join(sorted(each))} for each in ("4312", "9081")]
    lines = "\n".join(json.dumps(each) for each in documents)
    (tmp_path / "sorting.jsonl").write_text(lines)
    arguments = (
        tmp_path / "policy", "--lm-eval-include", tasks, "--interpreter", PYTHON,
        "--out", tmp_path / "out.jsonl",
    )  # fmt: skip
    done = run(*arguments, "--tasks", "lm_eval:sorting,lm_eval:choosing", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["lm_eval"]["policy"]["figures"]
    assert [(each["task"], each["metric"], each["documents"]) for each in found] == [
        ("choosing", "acc", 2),
        ("sorting", "exact_match", 2),
    ]
    answers = (tmp_path / "out.lm_eval.jsonl").read_text().splitlines()
    assert len(answers) == 1 + 4 + 2  # two choices of two documents, two texts
    again = run(*arguments, "--tasks", "lm_eval:choosing")
    assert "choosing acc" in again.output
    assert (tmp_path / "out.lm_eval.jsonl").read_text().splitlines() == answers
    (tasks / "asking.yaml").write_text(
        SORTING.format(folder=tmp_path).replace("sorting\n", "asking\n", 1).replace("}>", "}")
    )
    chat = (*arguments[:-1], tmp_path / "chat.jsonl", "--apply-chat-template", "--tasks")
    refused = run(*chat, "lm_eval:asking")
    assert refused.exit_code == 2 and "has no chat template" in refused.output
    template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    (tmp_path / "policy/chat_template.jinja").write_text(template)
    asked = run(*chat, "lm_eval:asking,lm_eval:choosing")
    assert asked.exit_code == 0, asked.output
    plain, chatted = (
        {json.loads(line)["key"] for line in path.read_text().splitlines()[1:]}
        for path in (tmp_path / "out.lm_eval.jsonl", tmp_path / "chat.lm_eval.jsonl")
    )
    assert len(plain & chatted) == 2  # the template makes the same prompts of two documents
    for name, words in (
        ("chess", "lm-eval has no task 'chess'"),
        ("missing", "is not on this machine"),
        ("arithmetic_2da", "is not on this machine"),
    ):
        refused = run(*arguments, "--tasks", f"lm_eval:{name}")
        assert refused.exit_code == 2 and words in refused.output, refused.output
