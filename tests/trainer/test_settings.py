from __future__ import annotations

from typing import Any

import pytest

from peers.trainer.collapse import AlarmLimits
from peers.trainer.settings import TrainerSettings
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.jobs.training import Sharding
from swarm.settings import PeerSettings


def settings(**table: Any) -> TrainerSettings:
    return PeerSettings(tables={"trainer": table}).of("trainer", TrainerSettings)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"modle": "x"}, r"settings of \[trainer\]: unknown key 'modle'; there are: activation_"),
        ({"model": "x", "seed": "7"}, r"\[trainer\]: seed is '7': input should be a valid int"),
        ({"model": "x", "seed": -1}, "seed is -1: input should be great"),
        ({"model": "x", "alarm_action": "cry"}, "alarm_action is 'cry': in"),
        ({"model": "x", "replicas": 0}, "replicas is 0"),
        ({"model": "x", "dtype": "int8"}, "dtype is 'int8'"),
        ({"model": "x", "optimiser": "sgd"}, "optimiser is 'sgd': input should be 'adamw',"),
        ({"model": "x", "pass_tokens": -1}, "pass_tokens is -1"),
        ({"model": "x", "memory_check": "no"}, "memory_check is 'no': input should be 'refuse' or"),
        ({"model": "x", "compile": "yes"}, "compile is 'yes': input should be a valid boolean"),
        ({"model": "x", "threads": 0}, "threads is 0"),
        (
            {"model": "x", "mirrors": ["https://a.b", "ftp://c"]},
            r"mirrors is \['https://a.b', 'ftp://c'\]: each must be an http:// or https://",
        ),
        ({"model": "x", "mirrors": ["http://a"] * 9}, "mirrors is .*: list should have at most 8"),
        ({"model": "x", "mirrors": "http://a"}, "mirrors is 'http://a': input should be a valid"),
        ({}, "the trainer needs a base policy"),
    ],
)
def test_mistakes_are_one_sentence(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        settings(**table)


def test_defaults() -> None:
    found = settings(model="base")
    assert found.limits == AlarmLimits()
    assert found.sharding == Sharding()
    assert found.hardware == Hardware()


def test_settings_of_the_memory_reach_the_learner() -> None:
    found = settings(model="base", optimiser="adamw8bit", pass_tokens=4096)
    assert found.sharding == Sharding(optimiser="adamw8bit", pass_tokens=4096)
