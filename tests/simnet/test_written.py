"""Scenarios as TOML files: what is wrong in them is said in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from simnet import scenarios
from simnet.scenarios.written import Written
from simnet.simulate import simulate
from swarm.errors import UserError

GOOD = """
about = "Few peers"
[run]
peers = 6
seconds = 60.0
[model]
gb = 0.0005
[[peers]]
name = "trainer"
count = 1
roles = ["trainer"]
step_seconds = 10.0
[[peers]]
name = "validator"
count = 1
roles = ["validator"]
[[peers]]
name = "worker"
roles = ["inference"]
region = "us-east"
uplink_mbps = 100
downlink_mbps = 100
"""


def test_a_file_is_run(tmp_path: Path) -> None:
    path = tmp_path / "few.toml"
    path.write_text(GOOD)
    report = simulate(str(path), seed=2)
    assert report["violations"] == []
    assert report["figures"]["policies_published"] > 1
    assert report["figures"]["peers_at_the_end"] == 6


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("seconds = 60.0", "seconds = 60.0\ncolour = 1", "colour"),
        ("gb = 0.0005", "gb = -1", r"\$\.model\.gb"),
        ("uplink_mbps = 100", "uplink_mbps = 0", r"uplink_mbps"),
        ("uplink_mbps = 100\n", "", "uplink_mbps and downlink_mbps go together"),
        ('"us-east"', '"atlantis"', r"us-east\|us-west.*region"),
        ('"validator"]', '"inference"]', "gives no peer the role validator"),
        ('"validator"]', '"cook"]', "unknown role 'cook'"),
        ('name = "worker"', 'name = "trainer"', "peers.name is given to two groups"),
        ("count = 1", "", "may be left out once"),
        ("peers = 6", 'peers = "six"', r"\$\.run\.peers"),
        ("roles =", 'adversary = "gremlin"\nroles =', "peers.adversary 'gremlin' is none of"),
        ("[run]", "[run", "few.toml"),
    ],
)
def test_a_wrong_file_is_one_sentence(old: str, new: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "few.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UserError, match=what) as caught:
        Written(path)
    assert "few.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_scenarios_that_are_shipped_can_be_loaded() -> None:
    for name in scenarios.names():
        assert scenarios.load(name).about


@pytest.mark.slow
def test_workers_behind_nats_take_part() -> None:
    report = simulate("nat", seed=1)
    assert report["violations"] == []
    assert report["figures"]["policies_published"] >= 3
