"""The demo's thresholds evict honest workers of other models; measured ones do not, and find int8.

`SWARM_REAL_MODEL` names the folder of a real model (SmolLM2-135M-Instruct took 1,900 tokens to its
eviction); without it, a random model of 24 layers stands for one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from peers.calibration.calibrate import EngineClass, measure_pairs, propose
from peers.demo.recipes import THRESHOLDS
from swarm.wire.manifest import Sampling
from tests.attacks.assessment import Judged, assess, judge
from tests.attacks.cheats import Generates, RandomWorkload
from tests.attacks.weights import int8, write_changed
from tests.calibration.deep_model import make_deep_model

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower

CLASSES = [EngineClass("float32", "cpu"), EngineClass("bfloat16", "cpu")]


def submissions(
    worker: Path, model: Path, sampling: Sampling, numbers: Sequence[int], dtype: str = "bfloat16"
) -> list[Judged]:
    """What a bf16 validator finds of a worker's submissions."""
    engine, workload = EngineClass(dtype, "cpu").engine(worker), RandomWorkload(model, sampling)
    validator = CLASSES[1].engine(model)
    return [judge(Generates(engine), validator, workload, n, "tried") for n in numbers]


def check(model: Path, sampling: Sampling, aside: Path) -> None:
    honest = submissions(model, model, sampling, range(2))
    demo = assess(honest, THRESHOLDS)
    assert demo.refused == 2 and demo.tokens_until_eviction is not None
    few = measure_pairs(model, RandomWorkload(model, sampling), CLASSES)
    limits = propose([[each] for each in few.values()])
    judged = assess(honest, limits)
    assert judged.refused == 0, judged.refused_by
    assert judged.tokens_until_eviction is None and judged.log_capital < 3
    cheat = submissions(write_changed(model, aside / "int8", int8), model, sampling, range(4))
    assert assess(cheat, limits).tokens_until_eviction is not None


@pytest.mark.slow
def test_honest_work_of_a_deep_model(tmp_path: Path) -> None:
    """Takes five seconds: fewer tokens do not tell honest work from int8 weights."""
    model = make_deep_model(tmp_path / "model", layers=24, vocabulary=512, positions=64)
    sampling = Sampling(max_new_tokens=24, stop_ids=[2], group_size=4, groups_per_submission=16)
    check(model, sampling, tmp_path)


@pytest.mark.slow
def test_honest_work_of_a_real_model(tmp_path: Path) -> None:
    if "SWARM_REAL_MODEL" not in os.environ:
        pytest.skip("SWARM_REAL_MODEL does not name the folder of a real model")
    sampling = Sampling(max_new_tokens=64, stop_ids=[2], group_size=4, groups_per_submission=16)
    check(Path(os.environ["SWARM_REAL_MODEL"]), sampling, tmp_path)
