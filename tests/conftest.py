"""What all tests share: asynchronous tests run in virtual time, and hypothesis with fewer examples
than its default and without wall-clock limits, which a busy machine would fail."""

from __future__ import annotations

import inspect
import os
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, settings

# First: libp2p by itself imports fastecdsa, which is not installed.
import swarm.transport.libp2p  # noqa: F401

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name of a model that is no folder asks nobody

settings.register_profile(
    "swarm",
    max_examples=25,  # the slow fuzzing of every parser tries thousands
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("swarm")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m slow`, files that do not name that mark are not even imported: all of them together
    take each process half a minute."""
    mark = config.getoption("markexpr")
    if collection_path.suffix != ".py" or not mark.isidentifier():
        return None
    return True if f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") else None


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Data are cached away from the user's own."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test with trio, on a clock that jumps while all tasks wait.

    It does not wait for threads and sockets: tests with deadlines on these are `wall_clock`. A
    module with a `RUNNER`, or a test with a fixture `network`, is run by that.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    given = {name: pyfuncitem.funcargs[name] for name in names}
    test = partial(pyfuncitem.obj, **given)
    runner = getattr(given.get("network"), "run", None) or getattr(
        pyfuncitem.module, "RUNNER", None
    )
    real = pyfuncitem.get_closest_marker("wall_clock") is not None
    if runner is not None:
        runner(test)
    else:
        trio.run(test, clock=None if real else trio.testing.MockClock(autojump_threshold=0))
    return True
