"""Every target with valid, kept and damaged inputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz import files
from tests.fuzz.__main__ import fuzz
from tests.fuzz.target import CORPUS, Target, with_nested_field
from tests.fuzz.targets import TARGETS

CORPUS_BYTES_MAX = 200 << 10


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    files.close()


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_the_documented_exceptions_leaves_a_parser(name: str) -> None:
    target = TARGETS[name]
    for raw in [b"", *target.seeds, *target.kept()]:
        for each in [raw, *with_nested_field(raw)]:
            target(each)
    _hypothesis(target)


def _hypothesis(target: Target) -> None:
    @settings(suppress_health_check=list(HealthCheck), deadline=None)
    @given(target.inputs())
    def run(raw: bytes) -> None:
        target(raw)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_holds_for_longer(name: str) -> None:
    assert fuzz(TARGETS[name], seconds=2)


def test_the_kept_corpus_is_small_and_belongs_to_targets() -> None:
    folders = {path.parent.name for path in CORPUS.glob("*/*")}
    assert folders <= set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.glob("*/*")) <= CORPUS_BYTES_MAX
