"""What all tests share: hypothesis with fewer examples than its default, and without
wall-clock limits, which a busy machine would fail; and tests that are async functions."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import trio
from hypothesis import HealthCheck, settings

settings.register_profile(
    "swarm",
    max_examples=25,  # the slow fuzzing of every parser tries thousands
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("swarm")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is an async function: by its module's `run_test`, else by `trio.run`."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    getattr(pyfuncitem.module, "run_test", trio.run)(partial(test, **arguments))
    return True
