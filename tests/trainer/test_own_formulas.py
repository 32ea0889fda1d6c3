"""The package of docs/objectives.md, installed as it stands there, and packages that fail."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from msgspec.structs import replace

from peers.learning import installed
from peers.learning.advantages import Completions, advantages
from peers.learning.objective import loss
from peers.learning.ranks import Ranks
from peers.learning.settings import LearnerSettings
from peers.learning.trial import with_digest
from peers.trainer.service import TrainerService
from swarm.errors import UserError
from swarm.wire.manifest import Objective, Schedule
from tests.docs.pages import ROOT
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_objective import random_columns, tokens_of, totals_of
from tests.trainer.test_service import start, submission, train

OWN = Objective(
    name="soft",
    options={"width": 0.3},
    advantage="winners",
    kl_coefficient=0,
    entropy_coefficient=0,
)
PAGE = (ROOT / "docs/objectives.md").read_text(encoding="utf-8")

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts the page's package, or another module with these functions, on the search path."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)

    def write(program: str = "", version: str = "0.1") -> Path:
        tables = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
        (project,) = (each for each in tables if "[project" in each)
        *_, page = re.findall(r"```python\n(.*?)```", PAGE, re.S)
        for old in site.glob("*.dist-info"):
            old.rename(tmp_path / f"old-{len(list(tmp_path.iterdir()))}")
        info = site / f"swarm_soft-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: swarm-soft\nVersion: {version}\n"
        )
        points = tomllib.loads(project)["project"]["entry-points"]
        lines = (
            f"[{group}]\n{n} = {v}\n" for group, each in points.items() for n, v in each.items()
        )
        (info / "entry_points.txt").write_text("".join(lines))
        (site / "swarm_soft.py").write_text(program or page)
        monkeypatch.delitem(sys.modules, "swarm_soft", raising=False)
        installed._loaded.cache_clear()
        return site

    return write


def test_its_loss_and_advantage_are_used(install: Install) -> None:
    install()
    signed = with_digest(OWN)
    assert len(signed.digest) == 32
    columns = random_columns(3, count=40, spread=0.2, extremes=False)
    value, metrics = loss(signed, tokens_of(columns), totals_of(columns))
    log_pi, log_old, _, advantage, *_ = [column.numpy() for column in columns]
    moved = 0.3 * np.tanh((np.exp(log_pi - log_old) - 1) / 0.3)
    assert float(value) == pytest.approx(float(-((1 + moved) * advantage).mean()))
    assert float(metrics["outside_formula"]) == pytest.approx((abs(moved) > 0.99 * 0.3).mean())
    found = advantages(signed, Completions.of([[0.0, 1.0], [0.5, 0.25]]))
    assert found.tolist() == [0.0, 0.5, 0.125, 0.0]


def test_what_it_changes_is_its_own(install: Install) -> None:
    *_, page = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    line = "ratio - 1) / width)\n"
    install(page.replace(line, f"{line}    tokens.log_mu.zero_()\n"))
    columns = random_columns(3, count=40, spread=0.2, extremes=False)
    loss(with_digest(OWN), tokens_of(columns), totals_of(columns))
    assert columns[2].any()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ratio - 1) / width)\n", "ratio - 1) / width)\n    1 / 0\n", "failed: ZeroDivisionError"),
        ("* tokens.advantage,", "* tokens.advantage * torch.nan,", "a number that is not finite"),
        (
            "-(1 + moved) * tokens.advantage,",
            "(-(1 + moved) * tokens.advantage)[1:],",
            r"the shape \[23\], not \[24\]",
        ),
        ("tokens.log_pi -", "tokens.log_pi.detach() -", "does not depend on tokens.log_pi"),
        (".clamp(min=0)", "[:1]", r"the advantage 'winners' failed: .* shape \[1\], not \[8\]"),
        ("import torch\n", "import torch\nimport absent_module\n", "cannot be loaded: No module"),
        ("def soft(", "soft = 3\n\n\ndef other(", "cannot be loaded: 3 is not a callable object"),
        ("ratio - 1) / width)\n", "ratio - 1) / width)\n    raise SystemExit\n", "SystemExit"),
        ("soft(numbers, tokens", "soft(numbers: 'torch.Nothing', _", "NameError: name 'tokens'"),
        ("ratio - 1) / width)\n", "ratio - 1) / width)\n    ratio.mul_(0)\n", "has no gradient"),
        ("width: Annotated", "length: Annotated", "has 'width'; .* takes: length"),
        ("gt=0", "gt=1", "objective.options: width is 0.3: Expected `float` > 1"),
    ],
)
def test_what_is_broken_is_refused_before_the_run_is_signed(
    install: Install, old: str, new: str, words: str
) -> None:
    *_, page = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert old in page
    install(page.replace(old, new))
    with pytest.raises(UserError, match=words):
        with_digest(OWN)


def test_another_package_of_the_name_does_not_train(install: Install) -> None:
    site = install()
    signed, schedule = with_digest(OWN), Schedule(steps=1, groups_per_step=1)
    LearnerSettings(signed, schedule)
    (site / "__pycache__").mkdir(exist_ok=True)
    (site / "__pycache__/swarm_soft.x.pyc").write_bytes(b"compiled here")
    LearnerSettings(signed, schedule)
    *_, page = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    for change in ({"version": "0.2"}, {"program": page + "\n"}, {"program": "raise SystemExit"}):
        install(**change)
        with pytest.raises(UserError, match="install the owner's versions on this trainer"):
            LearnerSettings(signed, schedule)


FAILS_AT = """
calls = 0

def soft(numbers, tokens, *, width: float = 0.2):
    global calls
    calls += 1
    share = -(tokens.log_pi - tokens.log_old).exp() * tokens.advantage
    if calls == 2:
        {failure}
    return share

def winners(numbers, completions):
    gain = completions.centred(completions.reward)
    if calls == 1:
        {advantage}
    return gain
"""


@pytest.mark.parametrize(
    ("failure", "advantage", "words"),
    [
        ("raise RuntimeError('no luck')", "pass", "'soft' failed: RuntimeError: no luck"),
        ("pass", "raise RuntimeError('no luck')", "'winners' failed: RuntimeError: no luck"),
        ("pass", "gain = gain * float('inf')", "'winners' failed: it returned a number that is n"),
        ("share = share * float('nan')", "pass", "a number that is not finite"),
        ("share = share[1:]", "pass", "the shape"),
        ("share = share.double() * 1e300", "pass", "a number that is not finite"),
        ("raise SystemExit(3)", "pass", "'soft' failed: SystemExit: 3"),
    ],
)
def test_a_formula_that_fails_costs_its_step_and_nothing_else(
    base: Path, tmp_path: Path, install: Install, failure: str, advantage: str, words: str
) -> None:
    install(FAILS_AT.format(failure=failure, advantage=advantage))
    service = TrainerService()
    job = start(base)
    trio.run(service.start, replace(job, terms=replace(job.terms, objective=OWN)))
    learner = service._held()
    weights = []
    for step in range(3):
        found = train(service, step, submission(base, tmp_path / str(step), policy=0))
        assert found.figures["skipped"] == (step == 1)
        assert bool(found.problems) == (step == 1)
        if step == 1:
            assert words in found.problems[0]
        weights.append([value.detach().clone() for value in learner.model.parameters()])
    same = [
        all(torch.equal(one, other) for one, other in zip(*pair, strict=True))
        for pair in pairwise(weights)
    ]
    assert same == [True, False]


FAILS_ON_ONE = """
import torch

def soft(numbers, tokens, *, width: float = 0.2):
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("no luck")
    return -(tokens.log_pi - tokens.log_old).exp() * tokens.advantage

def winners(numbers, completions):
    return completions.centred(completions.reward)
"""


@pytest.mark.slow
def test_the_rank_that_is_asked_knows_why_another_ranks_formula_failed(
    base: Path, tmp_path: Path, install: Install
) -> None:
    install(FAILS_ON_ONE)
    given = submission(base, tmp_path / "a", policy=0)

    def work(ranks: Ranks) -> tuple[float, list[str]]:
        service, job = TrainerService(ranks), start(base)
        trio.run(service.start, replace(job, terms=replace(job.terms, objective=OWN)))
        found = train(service, 0, given)
        return found.figures["skipped"], found.problems

    for skipped, problems in run_ranks(2, tmp_path, work):
        assert skipped == 1 and "'soft' failed: RuntimeError: no luck" in problems[0]
