"""The grader `reasoning-gym`: rows that the package wrote, and answers that must not be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import create_dataset

from peers.environments import NotGradable, Transcript, grade, load
from peers.environments.graders import make_grader


def environment(path: Path, name: str, **options: Any) -> Any:
    """An environment of entries of a data set, as docs/environments.md writes them."""
    entries = create_dataset(name, seed=1, size=4)
    path.write_text("".join(json.dumps(entry, default=str) + "\n" for entry in entries))
    return load(
        "dataset",
        "1",
        {
            "path": str(path),
            "columns": {"prompt": "question", "metadata": "metadata"},
            "grader": "reasoning-gym",
            **options,
        },
    )


def test_the_answer_earns_the_reward_tagged_or_not(tmp_path: Path) -> None:
    sums = environment(tmp_path / "rows.jsonl", "chain_sum")
    task = sums.task_of_row(0)
    for text in (task.answer, f" {task.answer}\n", f"1+1 is <answer>{task.answer}</answer>."):
        assert grade(sums, task, Transcript.of(text)).reward == 1
    for text in (f"{task.answer}0", "", "so", f"<answer>7</answer> {task.answer}"):
        assert grade(sums, task, Transcript.of(text)).reward == 0
    unfinished = Transcript.of(task.answer, finished=False)
    assert grade(sums, task, unfinished).parts == {"unfinished": 1.0}


def test_a_part_of_the_score_counts_only_where_the_options_say_so(tmp_path: Path) -> None:
    for partial, reward in ((False, 0.0), (True, 0.01)):
        options = [f"partial={json.dumps(partial)}"]
        some = environment(tmp_path / "rows.jsonl", "countdown", grader_options=options)
        given = grade(some, some.task_of_row(0), Transcript.of("1+1")).reward
        assert given in (reward, 5 * reward)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("countdown", "__import__('os').abort()"),
        ("countdown", "9**9**9**9"),
        ("simple_integration", "x**9**9**9"),
        ("simple_integration", "((x**99)**99)**99+(x**99)**99"),
        ("polynomial_multiplication", "S('exit()')"),
        ("n_queens", "exit()"),
        ("spiral_matrix", "[0]*10**10"),
        ("chain_sum", "9" * 30_000),
    ],
)
def test_no_answer_is_run_as_a_program(name: str, text: str, tmp_path: Path) -> None:
    hostile = environment(tmp_path / "rows.jsonl", name)
    given = grade(hostile, hostile.task_of_row(0), Transcript.of(text))
    assert given.reward == 0 and list(given.parts) in (["unreadable"], ["too long"])


def test_entries_without_metadata_are_not_gradable() -> None:
    with pytest.raises(NotGradable, match="no metadata with source_dataset"):
        make_grader("reasoning-gym").grade("5", "5", {})
