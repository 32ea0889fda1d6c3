"""Quantised weights are refused unless the run's manifest names their format."""

from __future__ import annotations

import msgspec
import pytest

from peers.inference.doctor import check_quantised
from swarm.errors import UserError
from swarm.wire.manifest import Thresholds

TAKES_FP8 = Thresholds(quantised_weights=["fp8"])


def test_a_run_that_names_the_format_admits_it() -> None:
    check_quantised("vllm", "fp8", TAKES_FP8)
    check_quantised("vllm", "none", Thresholds())
    check_quantised("native", "none", TAKES_FP8)


@pytest.mark.parametrize(
    ("engine", "thresholds", "sentence"),
    [
        (
            "vllm",
            Thresholds(),
            "inference.quantise is 'fp8', but the run's thresholds.quantised_weights does not name",
        ),
        ("native", TAKES_FP8, "inference.quantise is 'fp8', but engine 'native' does not quantise"),
    ],
)
def test_everything_else_is_one_sentence(
    engine: str, thresholds: Thresholds, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        check_quantised(engine, "fp8", thresholds)


def test_manifests_of_earlier_versions_admit_none() -> None:
    earlier = msgspec.msgpack.encode(list(msgspec.structs.astuple(Thresholds()))[:-1])
    assert msgspec.msgpack.decode(earlier, type=Thresholds).quantised_weights == []
