"""Rows of data sets by index: formats, folders, hashes, and what can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import blake3
import pyarrow
import pyarrow.parquet
import pytest

from peers.environments import load, task_of
from peers.environments.interface import UnusableTask
from peers.environments.rows import FOLDERS_VARIABLE, Rows
from swarm.errors import UserError

DATA: list[dict[str, Any]] = [
    {"question": f"{n} + {n}?", "answer": str(2 * n), "info": {"tests": [n, None], "at": "é"}}
    for n in range(25)
]


def write(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    rows = DATA if rows is None else rows
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_every_format_gives_the_same_rows_in_any_order(suffix: str, tmp_path: Path) -> None:
    rows = Rows.at(str(write(tmp_path / f"data{suffix}")))
    assert len(rows) == 25 and set(rows.columns) == {"question", "answer", "info"}
    for index in (24, 0, 3, 4, 17, 0):
        assert rows[index] == DATA[index]
    assert rows.row(9, ["answer"])["answer"] == "18"
    assert rows.hash() == blake3.blake3(rows.files[0].read_bytes()).hexdigest()


def test_a_folder_is_read_as_the_hub_lays_it_out(tmp_path: Path) -> None:
    for number in range(3):
        part = DATA[number * 5 : number * 5 + 5]
        write(tmp_path / f"data/train-0000{number}-of-00003.parquet", part)
    write(tmp_path / "data/test-00000-of-00001.parquet", DATA[20:])
    train, test = Rows.at(str(tmp_path)), Rows.at(str(tmp_path), "test")
    assert [train[index]["answer"] for index in range(15)] == [each["answer"] for each in DATA[:15]]
    assert len(train) == 15 and len(test) == 5 and test[0] == DATA[20]
    assert train.hash() != test.hash()
    with pytest.raises(UserError, match=r"split is 'dev', but .*; it has: data/test-00000-of-0000"):
        Rows.at(str(tmp_path), "dev")


def test_a_data_set_may_lie_in_a_folder_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "sums.jsonl")
    with pytest.raises(UserError, match=r"the data set /lab/sums.jsonl is not on this machine.*se"):
        Rows.at("/lab/sums.jsonl")
    monkeypatch.setenv(FOLDERS_VARIABLE, f"/nowhere:{tmp_path}")
    assert len(Rows.at("/lab/sums.jsonl")) == 25


def test_another_hash_is_a_sentence_with_the_right_one(tmp_path: Path) -> None:
    rows = Rows.at(str(write(tmp_path / "data.jsonl")))
    rows.check_hash(rows.hash())
    with pytest.raises(UserError, match=rf"has the hash {rows.hash()}, but the option hash is ab;"):
        rows.check_hash("ab")


def test_wrong_data_are_sentences(tmp_path: Path) -> None:
    def complaint(path: Path, split: str | None = None) -> str:
        with pytest.raises(UserError) as caught:
            Rows.at(str(path), split)
        return str(caught.value)

    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    assert complaint(empty).endswith("has no rows; give a data set with at least one")
    (tmp_path / "x.csv").write_text("a,b")
    assert "is no .parquet, .jsonl, .json file; convert it" in complaint(tmp_path / "x.csv")
    assert "is one file; remove split" in complaint(write(tmp_path / "d.jsonl"), "test")
    (tmp_path / "broken.parquet").write_text("no Parquet")
    assert "broken.parquet cannot be read (" in complaint(tmp_path / "broken.parquet")
    (tmp_path / "none").mkdir()
    assert "holds no .parquet, .jsonl, .json file" in complaint(tmp_path / "none")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    assert "list.jsonl cannot be read (it is no JSON object)" in complaint(tmp_path / "list.jsonl")


def test_a_wrong_row_or_column_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"a": 1}\n{"b": 2}\n{"a": \n')
    rows = Rows.at(str(path))
    rows.check_columns(["a"], "prompt_column")
    with pytest.raises(
        UserError, match=r"prompt_column names the column 'c', which .*; it has: a, b"
    ):
        rows.check_columns(["c"], "prompt_column")
    with pytest.raises(
        UserError, match=r"row 1 cannot be read \(it lacks 'a'; it has: b\); repair the data"
    ):
        rows.row(1, ["a"])
    with pytest.raises(UserError, match=r"row 2 cannot be read \(it is no JSON: Expecting"):
        rows.row(2)


def test_text_that_is_stored_as_bytes_is_text(tmp_path: Path) -> None:
    stored = [{"prompt": "é + 1?".encode(), "picture": b"\xff\xd8", "info": {"tests": [b"2"]}}]
    rows = Rows.at(str(write(tmp_path / "data.parquet", stored)))
    assert rows[0] == {"prompt": "é + 1?", "picture": None, "info": {"tests": ["2"]}}
    assert rows.row(0, ["prompt"])["prompt"] == "é + 1?"
    with pytest.raises(UserError, match=r"row 0 cannot be read \('picture' holds bytes that"):
        rows.row(0, ["picture"])


def test_two_data_sets_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    for name in ("main", "socratic"):
        write(tmp_path / name / "train-00000-of-00001.parquet", DATA[:5])
        write(tmp_path / name / "test" / "0.parquet", DATA[5:7])
    for split in (None, "test"):
        with pytest.raises(
            UserError, match=r"several data sets \(main, socratic\).*subset = .socratic"
        ):
            Rows.at(str(tmp_path), split)
    assert len(Rows.at(str(tmp_path / "main"))) == len(Rows.at(str(tmp_path), None, "main")) == 5
    assert len(Rows.at(str(tmp_path), "test", "*")) == 4
    with pytest.raises(UserError, match=r"subset is 'man', but .* it has: .*main.*did you mean"):
        Rows.at(str(tmp_path), None, "man")
    assert len(Rows.at(str(tmp_path / "socratic"), "test")) == 2


def test_the_parts_of_one_split_may_lie_in_folders(tmp_path: Path) -> None:
    for part in ("a", "b"):
        write(tmp_path / "data" / "train" / part / "0.jsonl", DATA[:3])
    assert len(Rows.at(str(tmp_path))) == 6


@pytest.mark.parametrize("lines", [False, True])
def test_a_json_file_is_a_list_or_lines(lines: bool, tmp_path: Path) -> None:
    path = tmp_path / "deepscaler.json"
    path.write_text("\n".join(map(json.dumps, DATA)) if lines else json.dumps([*DATA, 7], indent=1))
    rows = Rows.at(str(path))
    assert rows[24] == DATA[24] and list(rows.columns) == ["question", "answer", "info"]
    if not lines:
        with pytest.raises(UserError, match=r"row 25 cannot be read \(it is no JSON object"):
            rows.row(25)
    write(tmp_path / "rows" / "train.jsonl")
    (tmp_path / "rows" / "dataset_infos.json").write_text("{}")
    assert len(Rows.at(str(tmp_path / "rows"))) == 25


def test_one_bad_row_costs_itself(tmp_path: Path) -> None:
    """A mark of byte order, Windows' line ends, no JSON, other bytes, and a line of 50 MB."""
    good = b'{"a": "x"}'
    bad = {0: b"{oops", 2: b'{"a": "\xe9"}', 3: b'{"a": "' + b"y" * (50 << 20) + b'"}', 4: b"\0\0"}
    lines = [bad.get(index, good) for index in range(7)]
    for mark in (b"", b"\xef\xbb\xbf"):
        path = tmp_path / "bad.jsonl"
        path.write_bytes(mark + b"\r\n".join(lines))
        rows = Rows.at(str(path))
        assert len(rows) == 7 and list(rows.columns) == ["a"]
        for index in range(7):
            if index in bad:
                with pytest.raises(UserError, match=f"bad.jsonl: row {index} cannot be read "):
                    rows.row(index, ["a"])
            else:
                assert rows.row(index, ["a"]) == {"a": "x"}
        # A row that cannot be read stays, so that a look at the rows names it.
        assert list(rows.matching({"a": "x"}, "where")) == list(range(7))
        with pytest.raises(UserError, match=r"which have a = 'x'; change"):
            rows.matching({"a": "z"}, "where")


def test_damaged_parquet_costs_its_row_groups_or_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "data.parquet")  # row groups of four
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"data.parquet cannot be read \("):
        Rows.at(str(path))
    path.write_bytes(whole[:4] + b"\xff" * 300 + whole[304:])
    rows = Rows.at(str(path))
    with pytest.raises(UserError, match=r"row 0 cannot be read \("):
        rows.row(0)
    assert rows[4] == DATA[4]
    assert list(rows.matching({"answer": "18"}, "where")) == [0, 1, 2, 3, 9]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_chosen_by_conditions_and_values_named_by_place(
    suffix: str, tmp_path: Path
) -> None:
    rows = [
        {
            "source": "taco" if n % 2 else "numina",
            "rate": n / 8,
            "valid": n < 6,
            "level": str(n),
            "model.name": n,
            "reward_model": {"ground_truth": json.dumps({"inputs": [n, -n]}), "style": "rule"},
            "answer": ["proof", "notfound", None, "3"][n % 4],
        }
        for n in range(8)
    ]
    data = Rows.at(str(write(tmp_path / f"data{suffix}", rows)))
    for conditions, found in (
        ({"source": "taco"}, [1, 3, 5, 7]),
        ({"rate": "0.125:0.5"}, [1, 2, 3, 4]),
        ({"rate": ":0.125", "source": ["taco", "x"]}, [1]),
        ({"valid": True}, [0, 1, 2, 3, 4, 5]),
        ({"valid": "false"}, [6, 7]),
        ({"level": "6:"}, [6, 7]),
        ({"level": 6}, None),
        ({"rate": True}, None),
        ({"answer": "*"}, [0, 1, 3, 4, 5, 7]),
        ({"answer": ["!proof", "!notfound"], "valid": True}, [2, 3]),
        ({"answer": ["!proof", "3", "notfound"]}, [1, 3, 5, 7]),
        ({"reward_model.style": "rule", "reward_model.ground_truth.inputs.-1": "-2:-1"}, [1, 2]),
        ({"model.name": 3}, [3]),
    ):
        if found is None:
            with pytest.raises(UserError, match="where leaves none of the 8 rows"):
                data.matching(conditions, "where")
        else:
            assert list(data.matching(conditions, "where")) == found, conditions
    name = "reward_model.ground_truth.inputs.0"
    assert data.values(5, [name, "model.name"]) == {name: 5, "model.name": 5}
    for name, sentence in (
        ("reward_model.truth", "it lacks 'reward_model.truth'; reward_model has: .*ground_truth"),
        (
            "reward_model.ground_truth.inputs.2",
            r"it lacks .*; reward_model.ground_truth.inputs has: -2, -1, 0",
        ),
        ("source.x", "source is no JSON: "),
        ("level.x", "it lacks 'level.x'; level has: 5"),
    ):
        with pytest.raises(UserError, match=rf"row 5 cannot be used \({sentence}"):
            data.values(5, [name])


def test_data_that_change_under_a_peer_are_no_unusable_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": f"{n}", "answer": "1"} for n in range(40)])
    environment = load("dataset", "1", {"path": str(path)})
    assert task_of(environment, bytes(32)).answer == "1"
    path.write_text(path.read_text().replace('"1"}', '"2"}', 1) + "\n")
    for change in (lambda: None, path.unlink):
        change()
        with pytest.raises(UserError, match=r"data.jsonl has changed since it was opened") as error:
            task_of(environment, bytes(32))
        assert not isinstance(error.value, UnusableTask)
