"""`swarm rollouts`: what it shows of submissions, with and without a ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import blake3
import msgspec
import pyarrow.dataset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.engines.demo import save_tokenizer
from peers.learning.advantages import Completions, advantages
from swarm.errors import UserError
from swarm.ledger.archive import Archive
from swarm.ledger.entries import Consumed, encode
from swarm.look.archives import write_export
from swarm.look.rollouts import export as data
from swarm.look.rollouts.filters import Filters, parse_range
from swarm.look.rollouts.screen import figures, visible_lines
from swarm.look.rollouts.seen import SeenRollout, advantages_of, as_row
from swarm.look.rollouts.sources import RunLog, open_source
from swarm.rollouts.rollout import Rollout, Segment, Span
from swarm.rollouts.rollouts import Rollouts, Row, parts_of
from swarm.rollouts.submission_file import Header, write
from swarm.wire.envelope import seal
from swarm.wire.identity import Identity
from swarm.wire.manifest import Objective
from swarm.wire.messages import Verdict
from tests.commands.harness import complaint, signed_manifest, swarm
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
    assert steps("--step", "10:20") == steps("--peer", OTHER[-8:]) == [12, 12]
    assert steps("--environment", "sort-digits", "--step", ":1") == [1, 1]
    assert "more follow" in swarm("rollouts", "show", tmp_path, "--limit", "3").output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--reward", "good"], "--reward is 'good'; it must be two numbers in order"),
        (["--step", "20:10"], "--step is '20:10'; it must be two numbers in order"),
        (["--environment", "chess"], "none of the 1 submission"),
        (["--reward", "0:1"], "they have no verdicts here, so no rewards"),
        (["--tokenizer", "."], "--tokenizer . holds no tokenizer.json that can be read"),
        (["--from", "."], ". has no ledger.sqlite"),
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
    assert "holds no rollouts" in complaint("rollouts", "show", tmp_path)
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


@given(
    st.lists(st.floats(-2, 2), min_size=1, max_size=8),
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["grpo", "dr_grpo"]),
            "normalise_by_std": st.booleans(),
            "advantage": st.sampled_from(["group", "rloo"]),
        }
    ),
)
def test_advantages_are_the_trainers(rewards: list[float], chosen: dict[str, Any]) -> None:
    objective = msgspec.structs.replace(Objective(), **chosen)
    expected = advantages(objective, Completions.of([rewards]))
    assert advantages_of(rewards, objective) == pytest.approx(expected.tolist(), rel=1e-2, abs=1e-2)


def test_the_ledger_in_a_home_gives_rewards_and_outcomes(tmp_path: Path) -> None:
    """A group of which all rewards are equal is outside the loss."""
    groups = {0: [1.0, 0.0], 1: [0.0, 0.0]}
    rollouts = single_turns(
        group=[0, 0, 1, 1],
        sample=[0, 1, 0, 1],
        prompts=[[1, 6]] * 4,
        completions=[[5, 2]] * 4,
        proofs=[bytes(258)] * 4,
        policy=3,
    )
    digest, size = write(tmp_path / "file.parquet", rollouts, a_header())
    validator = Identity(bytes([4]) * 32)
    verdict = a_verdict(
        submission=digest, size_bytes=size, rewards=list(groups.values()), log_index=0
    )
    manifest = signed_manifest(tmp_path, validator)
    archive = Archive(manifest)
    log = archive.log(validator.peer_id)
    log.verdicts[0] = seal(
        validator, verdict, run=manifest.body.run, sequence=1, wall_time=1e9, lifetime_seconds=60
    )
    log.entries.append(encode(Consumed(step=7, submission=digest, outcomes=["consumed"] * 2)))
    write_export(archive, tmp_path / "ledger.jsonl")
    told = swarm(
        *("rollouts", "show", tmp_path / "file.parquet", "--json"),
        *("--from", tmp_path / "ledger.jsonl"),
    )
    rows = json.loads(told.output)["rollouts"]
    assert [row["reward"] for row in rows] == [1, 0, 0, 0]
    assert [row["turns"][1]["in_loss"] for row in rows] == [True, True, False, False]
    assert rows[0]["advantage"] == pytest.approx(-rows[1]["advantage"])
    assert (rows[0]["verdict"], rows[0]["outcome"], rows[0]["consumed_at"]) == (
        *("accepted", "consumed"),
        7,
    )


def test_a_group_without_a_grade_is_quarantined_alone_and_rewards_have_parts(
    tmp_path: Path,
) -> None:
    home = tmp_path / "validator" / "inbox"
    home.mkdir(parents=True)
    file = a_submission(home / "0-5-1.parquet")
    digest = blake3.blake3(file.read_bytes()).digest()
    source = open_source(tmp_path)
    verdict = a_verdict(
        submission=digest,
        rewards=[[1.0, 0.0]],
        parts=parts_of([{"form": 1.0}, {"form": 0.5, "unit": 0.25}]),
    )

    def seen(**fields: Any) -> SeenRollout:
        changed = msgspec.structs.replace(verdict, **fields)
        source.logs[tmp_path / "validator"] = RunLog(verdicts={digest: changed})
        return list(source.rollouts(Filters()))[1]

    assert seen().parts == {"form": 0.5, "unit": 0.25} and seen().turns[1].in_loss
    assert figures(seen())[0] == "reward 0 (form 0.5; unit 0.25)"
    assert as_row(seen())["parts"] == [
        {"name": "form", "value": 0.5},
        {"name": "unit", "value": 0.25},
    ]
    ungraded = seen(quarantined=[0], detail="1 of 2 groups are quarantined")
    assert (ungraded.fate, ungraded.reward, ungraded.parts) == ("quarantined", None, {})
    assert ungraded.origin.detail and not ungraded.turns[1].in_loss
    other = seen(quarantined=[1], detail="1 of 2 groups are quarantined")
    assert (other.fate, other.reward, other.origin.detail) == ("accepted", 0.0, None)


def test_json_lines_have_a_row_per_rollout(tmp_path: Path) -> None:
    a_submission(tmp_path / "file.parquet")
    out = tmp_path / "out.jsonl"
    assert "2 rollouts are in" in swarm("rollouts", "export", tmp_path, "--out", out).output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["turns"][1]["tokens"] for row in rows] == [[5, 6, 2], [6, 2]]


def test_a_data_set_folder_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "ROWS_PER_WRITE", 2)
    save_tokenizer(tmp_path)
    for step in range(4):
        a_submission(tmp_path / f"{step}.parquet", a_header(step=step))
    out = tmp_path / "set"
    assert swarm("rollouts", "export", tmp_path, "--out", out, "--tokenizer", tmp_path).status == 0
    read = pyarrow.dataset.dataset(out / "data").to_table()
    assert read.schema.equals(data.ROLLOUTS.schema) and read.num_rows == 8
    assert [row["turns"][1]["text"] for row in read.to_pylist()[:2]] == ["12<eos>", "2<eos>"]
    card = (out / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n") and "path: data/*.parquet" in card
    assert all(f"| `{name}` |" in card for name in data.ROLLOUTS.schema.names)


@pytest.mark.parametrize(
    ("to", "sentence"),
    [
        ("file.csv", "must end with .jsonl, or name a folder without a suffix"),
        ("full", "exists and is not an empty folder; choose another"),
        ("old.jsonl", "old.jsonl exists; choose another"),
        ("no/where", "there is no folder no"),
    ],
)
def test_wrong_targets_are_said_in_a_sentence(
    to: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a_submission(tmp_path / "rollouts.parquet")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "old.jsonl").write_text("")
    assert sentence in complaint("rollouts", "export", "rollouts.parquet", "--out", to)


def a_verdict(**fields: object) -> Verdict:
    fields = {"submission": bytes(32), "size_bytes": 1, "outcome": "accepted"} | fields
    return Verdict(
        worker=WORKER,
        lineage=0,
        step=5,
        policy=3,
        number=1,
        **fields,  # type: ignore[arg-type]
    )


def test_bounds_are_inclusive_and_may_be_open() -> None:
    assert parse_range("--step", "3", "1:2") == (3, 3)
    assert parse_range("--step", "3:", "1:2") == (3, float("inf"))
    with pytest.raises(UserError, match="--step is ':'"):
        parse_range("--step", ":", "1:2")
    with pytest.raises(UserError, match="--step is 'nan'"):
        parse_range("--step", "nan", "1:2")
