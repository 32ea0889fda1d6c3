from __future__ import annotations

from typing import Any

import pytest

from peers.trainer.alarms import Limits
from peers.trainer.options import TrainerOptions, trainer_options
from swarm.errors import UserError
from swarm.jobs import Sharding


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"trainer.modle": "x"}, r"unknown key 'trainer.modle'; there are: trainer.activation_"),
        ({"trainer.model": "x", "trainer.seed": "7"}, "trainer.seed is '7': input should be a val"),
        ({"trainer.model": "x", "trainer.seed": -1}, "trainer.seed is -1: input should be great"),
        (
            {"trainer.model": "x", "trainer.alarm_action": "cry"},
            "trainer.alarm_action is 'cry': in",
        ),
        ({"trainer.model": "x", "trainer.replicas": 0}, "trainer.replicas is 0"),
        (
            {"trainer.model": "x", "trainer.mirrors": ["https://a.b", "ftp://c"]},
            r"trainer.mirrors is \['https://a.b', 'ftp://c'\]: each must be an http:// or https://",
        ),
        (
            {"trainer.model": "x", "trainer.mirrors": ["http://a"] * 9},
            "trainer.mirrors is .*: list should have at most 8 items",
        ),
        (
            {"trainer.model": "x", "trainer.mirrors": "http://a"},
            "trainer.mirrors is 'http://a': input should be a valid list",
        ),
        ({}, "the trainer needs a base policy"),
    ],
)
def test_mistakes_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        trainer_options(options)


def test_other_roles_options_are_not_its_business() -> None:
    found = trainer_options({"trainer.model": "base", "inference.fault": "x"})
    assert found == TrainerOptions(model="base")
    assert found.limits == Limits()
    assert found.sharding == Sharding()
