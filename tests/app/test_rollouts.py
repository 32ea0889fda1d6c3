"""`swarm rollouts`: what it shows of submissions, with and without a ledger."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers.engines.demo import save_tokenizer
from peers.trainer.learning.objective import advantages
from swarm.app.rollouts.filters import parse_range
from swarm.app.rollouts.screen import visible_lines
from swarm.app.rollouts.seen import advantages_of, grades_of
from swarm.app.rollouts.text import Decoder
from swarm.errors import UserError
from swarm.identity import Identity
from swarm.messages import Objective, Verdict
from swarm.rollouts.rollout import Rollout, Segment, Span
from swarm.rollouts.rollouts import Rollouts, Row
from swarm.rollouts.submission_file import Header, write
from tests.app.harness import complaint, swarm
from tests.rollouts.harness import single_turns

WORKER = Identity(bytes([2]) * 32).peer_id
OTHER = Identity(bytes([3]) * 32).peer_id


def a_header(engine: str = "native", step: int = 5, worker: str = WORKER) -> Header:
    return Header(
        run=f"{OTHER}/sorting",
        lineage=0,
        step=step,
        policy=3,
        worker=worker,
        number=1,
        environments=[("sort-digits", "1"), ("tools", "2")],
        temperature=1.0,
        max_new_tokens=8,
        stop_ids=[2],
        engine=engine,
    )


def a_submission(path: Path, header: Header | None = None) -> Path:
    rollouts = single_turns(
        group=[0, 0],
        sample=[0, 1],
        prompts=[[1, 6, 5, 14]] * 2,
        completions=[[5, 6, 2], [6, 2]],
        log_probabilities=[[-0.5, -0.25, -0.125], [-1.0, -2.0]],
        proofs=[bytes(258)] * 2,
        policy=3,
    )
    write(path, rollouts, header or a_header())
    return path


def an_episode() -> Rollouts:
    """One rollout of two turns, whose policy is swapped in the second."""
    segments = (
        Segment("prompt", [1, 6]),
        Segment("model", [5, 2], "stop", [-1.0, -1.0], (Span(3, 2),)),
        Segment("environment", [7, 8]),
        Segment("model", [6, 6, 2], "stop", [-1.0] * 3, (Span(3, 1), Span(4, 2))),
    )
    return Rollouts.from_rows([Row(0, 0, 1, Rollout(segments), bytes(258))])


def test_rollouts_are_shown_with_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    file = a_submission(tmp_path / "rollouts.parquet")
    shown = swarm("rollouts", "show", file, "--tokenizer", tmp_path)
    assert shown.status == 0
    assert "step 5  policy 3  sort-digits 1  group 0 of number 1" in shown.output
    assert "prompt │ <bos>21>" in shown.output
    assert "model ┃ 12<eos>" in shown.output and "-0.875" in shown.output
    told = json.loads(swarm("rollouts", "show", file, "--json").output)["rollouts"]
    assert [row["policy"] for row in told] == [3, 3]
    assert [(row["turns"][1]["tokens"], row["turns"][1]["finish"]) for row in told] == [
        ([5, 6, 2], "stop"),
        ([6, 2], "stop"),
    ]


def test_an_episode_shows_all_turns_and_policies(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    write(tmp_path / "file.parquet", an_episode(), a_header())
    shown = swarm("rollouts", "show", tmp_path, "--tokenizer", tmp_path)
    assert "tools 2" in shown.output and "policies 3 → 4" in shown.output
    bars = [line.split()[:2] for line in shown.output.splitlines()[3:] if set(line) & set("│┃")]
    assert bars == [["prompt", "│"], ["model", "┃"], ["environment", "│"], ["model", "┃"]]


def test_without_a_tokenizer_token_ids_are_shown(tmp_path: Path) -> None:
    shown = swarm("rollouts", "show", a_submission(tmp_path / "rollouts.parquet"))
    assert "prompt │ 1 6 5 14" in shown.output
    assert "give --tokenizer FOLDER" in shown.errors


def test_filters_and_limit_choose_rollouts(tmp_path: Path) -> None:
    a_submission(tmp_path / "first.parquet", a_header(step=1))
    a_submission(tmp_path / "second.parquet", a_header(step=12, worker=OTHER))

    def steps(*options: str) -> list[int]:
        told = swarm("rollouts", "show", tmp_path, "--json", *options)
        return [row["step"] for row in json.loads(told.output)["rollouts"]]

    assert steps() == [1, 1, 12, 12]
    assert steps("--limit", "3") == [1, 1, 12]
    assert steps("--step", "10:20") == steps("--worker", OTHER[-8:]) == [12, 12]
    assert steps("--environment", "sort-digits", "--step", ":1") == [1, 1]
    assert "more follow" in swarm("rollouts", "show", tmp_path, "--limit", "3").output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--reward", "good"], "--reward is 'good'; it must be two numbers in order"),
        (["--step", "20:10"], "--step is '20:10'; it must be two numbers in order"),
        (["--environment", "chess"], "passes --environment chess; it holds 1 submissions"),
        (["--reward", "0:1"], "without verdicts, so without rewards; widen the filters"),
        (["--tokenizer", "."], "--tokenizer . holds no tokenizer.json that can be read"),
        (["--ledger", "."], ". has no ledger.sqlite"),
    ],
)
def test_wrong_options_are_said_in_a_sentence(
    options: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a_submission(tmp_path / "rollouts.parquet")
    assert sentence in complaint("rollouts", "show", "rollouts.parquet", *options)


def test_wrong_sources_are_said_in_a_sentence(tmp_path: Path) -> None:
    assert "cannot be read" in complaint("rollouts", "show", tmp_path / "missing")
    assert "holds no rollouts" in complaint("rollouts", "browse", tmp_path)
    (tmp_path / "file.parquet").write_bytes(b"no parquet")
    assert "is no submission" in complaint("rollouts", "show", tmp_path / "file.parquet")
    a_submission(tmp_path / "whole.parquet")
    told = swarm("rollouts", "show", tmp_path)
    assert told.status == 0 and "not read: " in told.errors and "file.parquet" in told.errors


def test_hostile_text_cannot_steer_a_terminal(tmp_path: Path) -> None:
    hostile = "\x1b[2J\x07\u202e[bold]"
    file = a_submission(tmp_path / "rollouts.parquet", a_header(engine=hostile))
    assert "\x1b" not in swarm("rollouts", "show", file).output
    assert visible_lines(hostile, 100) == [r"\x1b[2J\x07\u202e[bold]"]


@given(st.text(max_size=50), st.integers(1, 30))
def test_shown_lines_are_printable_and_bounded(text: str, limit: int) -> None:
    shown = visible_lines(text, limit)
    assert all(line.isprintable() for line in shown)
    assert sum(map(len, shown)) <= 10 * limit + 40


def test_unknown_token_ids_are_shown_as_numbers(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert Decoder(tmp_path).decode([1, -7, 6, 10**6]) == "<bos>⟨token -7⟩2⟨token 1000000⟩"


@given(
    st.lists(st.floats(-2, 2), min_size=1, max_size=8),
    st.sampled_from(["grpo", "dr_grpo"]),
    st.booleans(),
)
def test_advantages_are_the_trainers(rewards: list[float], name: str, by_std: bool) -> None:
    objective = msgspec.structs.replace(Objective(), name=name, normalise_by_std=by_std)
    expected = advantages(torch.tensor(rewards, dtype=torch.float64), objective)
    assert advantages_of(rewards, objective) == pytest.approx(expected.tolist(), abs=1e-6)


@given(st.integers(0, 2), st.lists(st.integers(1, 50), min_size=3, max_size=3))
def test_a_length_penalty_is_told_apart_from_the_task(which: int, lengths: list[int]) -> None:
    targets, task = [10, 60, 200], [1.0, 0.0, 1.0]
    rewards = [t - 0.01 * abs(targets[which] - n) for t, n in zip(task, lengths, strict=True)]
    verdict = a_verdict(rewards=[rewards], task_means=[2 / 3], task_spreads=[1.0])
    options = {"lengths": targets, "alpha": 0.01}
    found = grades_of(verdict, 0, lengths, Objective(), options)
    assert found.task_rewards == pytest.approx(task)
    assert grades_of(verdict, 0, lengths, Objective(), {}).task_rewards == ()
    assert grades_of(verdict, 1, lengths, Objective(), options).rewards == ()


def a_verdict(**fields: object) -> Verdict:
    return Verdict(
        submission=bytes(32),
        size_bytes=1,
        worker=WORKER,
        lineage=0,
        step=5,
        policy=3,
        number=1,
        outcome="accepted",
        **fields,  # type: ignore[arg-type]
    )


def test_bounds_are_inclusive_and_may_be_open() -> None:
    assert parse_range("--step", "3", "1:2") == (3, 3)
    assert parse_range("--step", "3:", "1:2") == (3, float("inf"))
    with pytest.raises(UserError, match="--step is ':'"):
        parse_range("--step", ":", "1:2")
    with pytest.raises(UserError, match="--step is 'nan'"):
        parse_range("--step", "nan", "1:2")
