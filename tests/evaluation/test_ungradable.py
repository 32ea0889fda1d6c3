"""Rows and samples that cannot be graded: counted by kind, listed, and bounded by a share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peers.evaluation.report import figures_of, gains_of
from peers.evaluation.run import Evaluation, Measured
from peers.evaluation.samples import Ungradable, kind_of, open_samples
from swarm.errors import UserError
from swarm.jobs.evaluation import RowsRead, Sample, TasksDrawn
from swarm.wire.manifest import EnvironmentReference

JUDGE = (
    "environment 'dataset' cannot know the reward of the completion 'a: b' of /d/x.jsonl: row 7: "
    "math-verify cannot judge '{}': it takes more than 2 s; repair it"
)


def sample(row: int, reward: float = 1.0, problem: str = "") -> Sample:
    return Sample(
        environment=0, row=row, reward=reward, finished=True, tokens=1, turns=["", ""],
        problem=problem,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (JUDGE.format("9^9"), "math-verify cannot judge …: it takes more than … s"),
        ("/d/x.jsonl: row 12: 'answer' is None; it must be text", "… is None"),
        (
            '/d/x.jsonl: row 1,204: the answer "it\'s" holds no number',
            "the answer … holds no number",
        ),
        ("the judge does not answer", "the judge does not answer"),
        ("x: row 3: the task's tests {'a': '[]'} are bad (none)", "the task's tests … are bad"),
    ],
)
def test_a_kind_is_what_problems_share(problem: str, kind: str) -> None:
    assert kind_of(problem) == kind


def test_up_to_the_share_problems_are_listed_and_then_they_stop(tmp_path: Path) -> None:
    path = tmp_path / "e.ungradable.jsonl"
    found = Ungradable(path, 0.1)
    row = "/d/x.jsonl: row 3: the prompt is empty"
    found.add_rows("dataset", RowsRead(rows=10, faults=1, unusable=[row, "row 4: it is too long"]))
    for number in range(2):
        found.add("dataset", sample(number, problem=JUDGE.format(number)), 20)
    with pytest.raises(UserError, match=r"3 of 20 samples .* --ungradable-max 0.1; repair"):
        found.add("dataset", sample(3, problem=JUDGE.format(3)), 20)
    found.close()
    assert [json.loads(line)["what"] for line in path.read_text().splitlines()] == (
        ["row", "row", "sample", "sample", "sample"]
    )
    with pytest.raises(UserError, match="2 of 10 rows of dataset cannot be graded"):
        Ungradable(path, 0.1).add_rows("dataset", RowsRead(rows=10, faults=2, unusable=[]))
    Ungradable(path, 0.0).close()
    assert not path.exists(), "the list of an earlier run says nothing about this one"


def test_a_sample_that_could_not_be_graded_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with open_samples(path, {"checkpoint": "a"}) as file:
        for each in (sample(0, 0.0, "away"), sample(1), sample(0, 1.0), sample(1, 0.0)):
            file.append(each)
    with open_samples(path, {"checkpoint": "a"}) as file:
        assert [(each.row, each.reward) for each in file.samples] == [(0, 1.0), (1, 1.0)]


def test_figures_leave_tasks_out_that_cannot_be_graded() -> None:
    wanted = Evaluation(
        environments=[EnvironmentReference(name="e", version="1")], split="held_out", tasks=3,
        samples=1, temperature=1.0, max_new_tokens=1, stop_ids=[],
    )  # fmt: skip
    drawn = TasksDrawn(checkpoint="", engine="", tasks=[3], max_new_tokens=1, stop_ids=[])
    tasks = [[sample(0)], [sample(1, 0.0, "away")], [sample(2, 0.0)]]
    others = [[sample(0, 0.0, "away")], [sample(1)], [sample(2)]]
    figures = figures_of(wanted, Measured("", drawn, [tasks]))["e"]
    assert (figures["tasks"], figures["ungradable"], figures["reward"].value) == (2, 1, 0.5)
    gains = gains_of(wanted, Measured("", drawn, [tasks]), Measured("", drawn, [others]))["e"]
    assert gains["reward"].value == -1, "only the third task is graded in both"
    with pytest.raises(UserError, match="no task of e can be graded"):
        figures_of(wanted, Measured("", drawn, [tasks[1:2]]))
