"""Sandboxes of children that have given up what walls are made of."""

from __future__ import annotations

import importlib
import inspect

import pytest

from simnet.compute.children import MODELS


@pytest.mark.parametrize("service", MODELS)
def test_a_child_that_has_environments_starts_a_launcher_before_its_keys_close(
    service: str,
) -> None:
    """Any environment may run programs; see `swarm.world.child`."""
    module, _, name = service.partition(":")
    loaded = importlib.import_module(module)
    source = inspect.getsource(loaded)
    if "Environments(" in source or "load_named(" in source:
        assert hasattr(getattr(loaded, name), "before_keys_close")
