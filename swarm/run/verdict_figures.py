"""Figures of a verdict's checks, as events and tables show them."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.wire.messages import Check

STATISTICAL = ("activations", "sampling", "sampling_bound", "selection", "evidence")
"""Checks that honest work may come near to, whose figure must not exceed the threshold."""


def failed_check(checks: Sequence[Check], failed: str) -> Check | None:
    """The check that a verdict names as failed. Others may have failed and only been observed."""
    return next((check for check in checks if check.name == failed and not check.passed), None)


def nearest(checks: Sequence[Check]) -> str:
    """The statistical check that came nearest to its limit, as "activations 4.1 of 6".

    Empty if nothing was recomputed.
    """
    found = [check for check in checks if check.name in STATISTICAL and check.threshold > 0]
    if not found:
        return ""
    near = max(found, key=lambda check: check.figure / check.threshold)
    return f"{near.name} {max(0.0, near.figure):.2g} of {near.threshold:.2g}"
