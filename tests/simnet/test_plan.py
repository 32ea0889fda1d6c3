"""The plan: bounds that nothing beats, relays, idle shares, and one sentence for mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from simnet.cli import command
from simnet.plan import (
    SLACK,
    Network,
    binding,
    bounds,
    idle_share,
    relay_only_bounds,
    relays_needed,
)

NETWORK = Network(
    model_gb=62, inference=200, relays=4, uplink_mbps=200, downlink_mbps=500,
    relay_uplink_mbps=10_000, trainer_uplink_mbps=1000,
)  # fmt: skip

networks = st.builds(
    Network,
    model_gb=st.floats(0.1, 1000), inference=st.integers(1, 2000), relays=st.integers(0, 50),
    uplink_mbps=st.floats(1, 1e4), downlink_mbps=st.floats(1, 1e4),
    relay_uplink_mbps=st.floats(1, 1e5), trainer_uplink_mbps=st.floats(1, 1e5),
)  # fmt: skip


def test_the_terms_are_those_of_the_design() -> None:
    terms = bounds(NETWORK)
    assert terms["the trainer's uplink"] == pytest.approx(62e9 / 125e6)
    assert terms["the slowest downlink"] == pytest.approx(62e9 / 62.5e6)
    all_uplinks = 125e6 + 4 * 1250e6 + 200 * 25e6
    assert terms["all uplinks together"] == pytest.approx(204 * 62e9 / all_uplinks)
    assert binding(terms)[0] == "all uplinks together"
    relay = relay_only_bounds(NETWORK)
    assert relay["the relays' uplinks"] == pytest.approx(200 * 62e9 / (4 * 1250e6))


@given(networks)
def test_passing_pieces_on_is_never_slower(network: Network) -> None:
    alone, together = binding(relay_only_bounds(network))[1], binding(bounds(network))[1]
    assert together <= alone * (1 + 1e-9)


@given(networks)
def test_the_relays_asked_for_are_enough_and_one_less_is_not(network: Network) -> None:
    for terms in (bounds, relay_only_bounds):
        needed = relays_needed(network, terms)
        both = bounds(network)
        floor = max(both["the trainer's uplink"], both["the slowest downlink"])
        if needed is not None:
            assert binding(terms(replace(network, relays=needed)))[1] <= SLACK * floor
            if needed > 0:
                assert binding(terms(replace(network, relays=needed - 1)))[1] > SLACK * floor


@pytest.mark.parametrize(
    ("step", "batch", "broadcast", "slowest", "share"),
    [
        (22, 22, 14, "training", 0.0),  # INTELLECT-2, short targets
        (21, 29, 14, "generation", 1 - 21 / 29),  # long targets
        (5, 5, 30, "the broadcast", 1 - 5 / 30),
        (10, 10, 10, "training", 0.0),
    ],
)
def test_the_slowest_stage_is_what_the_trainer_waits_for(
    step: float, batch: float, broadcast: float, slowest: str, share: float
) -> None:
    found = idle_share(step, batch, broadcast, asynchrony=2)
    assert found["slowest"] == slowest
    assert found["trainer_idle_share"] == pytest.approx(share, abs=1e-4)


def test_without_asynchrony_the_trainer_waits_for_the_whole_round() -> None:
    found = idle_share(20, 20, 10, asynchrony=0)
    assert found["slowest"] == "the whole round"
    assert found["trainer_idle_share"] == pytest.approx(1 - 20 / 50)


def test_json_comes_to_standard_output_alone() -> None:
    result = CliRunner().invoke(command, ["plan", "--json", "-"])
    assert json.loads(result.stdout)["swarm"]
    assert "how long does a broadcast take" in result.stderr


def test_the_table_answers_the_three_questions(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = CliRunner().invoke(
        command,
        ["plan", "--model-gb", "62", "--inference", "200", "--relays", "4", "--step-minutes", "22",
         "--tokens-per-second", "40", "--json", str(path)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for words in (
        "how long does a broadcast take", "How many relays do I need?",
        "What will my trainer idle?", "binds",
    ):  # fmt: skip
        assert words in result.output
    plan = json.loads(path.read_text())
    assert plan["swarm"]["binding"] == "all uplinks together"
    assert plan["swarm"]["bound_seconds"] == pytest.approx(1249.2, abs=0.1)
    assert plan["trainer"]["batch_seconds"] == pytest.approx(4096 * 2500 / 8000, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--inference", "0"], "--inference must be at least 1, not 0"),
        (["--relays", "-1"], "--relays must be 0 or more, not -1"),
        (["--model-gb", "-3"], "--model-gb must be above 0, not -3"),
        (["--uplink-mbps", "nan"], "--uplink-mbps must be above 0, not nan"),
        (["--tokens-per-second", "0"], "--tokens-per-second must be above 0, not 0"),
        (["--asynchrony", "99"], "--asynchrony must lie between 0 and 64, not 99"),
        (["--json", "/no/such/file"], "there is no folder /no/such"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(command, ["plan", *arguments])
    assert result.exit_code == 2
    assert sentence in result.output
    assert len(result.output.splitlines()) == 1
