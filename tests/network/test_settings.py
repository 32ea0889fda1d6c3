from __future__ import annotations

from pathlib import Path

import pytest

from peers.inference.settings import InferenceSettings
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.roles import check_tables
from swarm.settings import PeerSettings, load_settings


def read(folder: Path, text: str) -> PeerSettings:
    (folder / "peer.toml").write_text(text, encoding="utf-8")
    settings = load_settings(folder / "peer.toml", {})
    check_tables(settings)
    return settings


def test_each_role_has_a_table(tmp_path: Path) -> None:
    settings = read(
        tmp_path, 'role = ["inference"]\n[inference]\ndevice = "cpu"\nalter_weights = 0.5\n'
    )
    found = settings.of("inference", InferenceSettings)
    assert found.hardware == Hardware(device="cpu")
    assert found.alter_weights == 0.5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "[inference]\nspeed = 1\n",
            r"\[inference\]: unknown key 'speed'; there are: adapters, alter_",
        ),
        ("[inference]\nthreads = 'all'\n", r"\[inference\]: threads is 'all'"),
        ("[validator]\nalter_weights = 1.0\n", r"\[validator\]: unknown key 'alter_weights'"),
        ("[relay]\nspeed = 1\n", r"\[relay\]: unknown key 'speed'"),
        ("[trainor]\nmodel = 'x'\n", r"unknown key 'trainor'; there are: \[environment\]"),
        ("[tables.inference]\nthreads = 1\n", "unknown key 'tables'"),
        ("inference = 3\n", "unknown key 'inference'"),
        ("rolle = ['relay']\n", "unknown key 'rolle'; there are: .*role"),
    ],
)
def test_mistakes_are_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        read(tmp_path, text)
