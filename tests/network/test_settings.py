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


def test_any_setting_can_be_given_on_the_line(tmp_path: Path) -> None:
    (tmp_path / "peer.toml").write_text("[inference]\nthreads = 2\n", encoding="utf-8")
    given = ["inference.device=cuda:1", "uplink_mbps=20", "environments=['harness']"]
    given += ("alarms.starved_seconds=5.0", "metrics=127.0.0.1:0", "inference.interpreter=")
    settings = load_settings(tmp_path / "peer.toml", {"uplink_mbps": None}, given)
    found = settings.of("inference", InferenceSettings)
    assert (found.device, found.threads, found.interpreter) == ("cuda:1", 2, "")
    assert (settings.uplink_mbps, settings.environments) == (20, ["harness"])
    assert (settings.alarms.starved_seconds, settings.metrics) == (5.0, "127.0.0.1:0")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("inference.speed=1", r"\[inference\]: unknown key 'speed'"),
        ("inference.threads=all", r"\[inference\]: threads is 'all'"),
        ("inferense.threads=1", "--set inferense.threads is of no table; there are: alarms"),
        ("speed=1", "settings: unknown key 'speed'"),
        ("uplink_mbps=fast", "uplink_mbps is 'fast'"),
        ("tables.inference=1", "--set tables.inference is of no table"),
        ("role=trainer", r"role is 'trainer': .* valid list, such as \['trainer'\]"),
        ("uplink_mbps", "--set is 'uplink_mbps'; write it as NAME=VALUE"),
        ("=1", "--set is '=1'; write it as NAME=VALUE"),
    ],
)
def test_mistakes_on_the_line_are_one_sentence(given: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_tables(load_settings(None, {}, (given,)))
