"""Data sets by their names of the hub, with its real client library and a hub on loopback."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from peers.environments import load
from peers.environments.rows import Rows
from swarm.errors import UserError
from tests.models.hub_server import COMMIT, OLDER, Hub, Repository

NAME = "openai/gsm8k"


def parquet(*names: str) -> bytes:
    table = pyarrow.table({"question": list(names), "answer": ["#### 1"] * len(names)})
    pyarrow.parquet.write_table(table, file := io.BytesIO())
    return file.getvalue()


@pytest.fixture
def data(hub: Hub) -> Hub:
    hub.repositories[NAME] = Repository(
        {
            "README.md": b"# Sums",
            "gsm8k.py": b"raise SystemExit",
            "main/train-00000-of-00001.parquet": parquet(*(f"main {n}" * 40 for n in range(40))),
            "main/test-00000-of-00001.parquet": parquet("test"),
            "socratic/train-00000-of-00001.parquet": parquet("socratic"),
        }
    )
    return hub


def refused(path: str = NAME, split: str | None = None, subset: str | None = "main") -> str:
    with pytest.raises(UserError) as error:
        Rows.at(path, split, subset)
    return str(error.value)


def test_a_data_set_of_the_hub_is_fetched_in_part_and_pinned(
    data: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"path": NAME, "subset": "main", "columns": {"prompt": "question"}}
    environment = load("dataset", "1", options | {"grader": "number"})
    pins = dict(environment.pins())
    assert pins["path"] == f"{NAME}@{COMMIT}" and len(str(pins["hash"])) == 64
    fetched = {path for method, path, _ in data.asked if method == "GET" and "cdn/" in path}
    assert fetched == {f"cdn/{NAME}/main/train-00000-of-00001.parquet"}
    # As a worker reads the manifest, later: nothing is asked, so the hub may be away.
    data.asked.clear()
    again = load("dataset", "1", options | {"grader": "number"} | pins)
    assert again.pins() == {"hash": pins["hash"]}
    assert not data.asked
    # The file of another split is not there, and is not mistaken for this one.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert len(Rows.at(f"{NAME}@{COMMIT}", None, "main")) == 40
    for path, split in ((NAME, None), (f"{NAME}@{COMMIT}", "test")):
        assert "not whole in the cache, and HF_HUB_OFFLINE is set" in refused(path, split)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert len(Rows.at(f"{NAME}@{COMMIT}", "test", "main")) == 1
    assert Rows.at(f"{NAME}@v1", "test", "main").where == f"{NAME}@{OLDER}"


def test_wrong_names_and_a_hub_that_fails_are_sentences(
    data: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "several data sets (main, socratic)" in refused(subset=None)
    assert "has no data set of that name" in refused("someone/else")
    assert "the hub has openai/gsm8k, but no such revision" in refused(f"{NAME}@v2")
    assert "the data set lab/sums.jsonl is not on this machine" in refused("lab/sums.jsonl")
    train = "main/train-00000-of-00001.parquet"
    repository = data.repositories[NAME]
    repository.stated_bytes[train] = 100
    assert "sent more than" in refused()
    repository.stated_bytes.clear()
    repository.false.add(train)
    assert "arrived with another SHA-256" in refused()
    repository.false.clear()
    repository.files["../outside.parquet"] = parquet("out")
    repository.files[train] = json.dumps({}).encode()
    assert "train-00000-of-00001.parquet cannot be read" in refused()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be fetched from http://127.0.0.1:9" in refused("openai/other")


def test_a_folder_here_comes_first(
    data: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text('{"question": "here"}')
    monkeypatch.setenv("SWARM_DATASETS", str(tmp_path))
    assert Rows.at(NAME)[0] == {"question": "here"} and not data.asked
