"""Attacks on the network and on records: production peers in the simulator, some of them hostile.

Every run is compared with the same run without them (`hostile`): it must keep its pace, its
invariants, and every honest submission.
"""

from __future__ import annotations

from tests.attacks.hostile import Outcome, Setting, alone, attacked

PACE = 0.9
"""Share of the undisturbed run's policies that a run beside hostile peers trains."""
SECONDS = 60.0
"""Virtual time of a run, in which 13 policies are published; `benchmarks.attacks` runs longer."""
COUNT = 4
"""Hostile identities, as many as honest workers."""


def harmless(kind: str, *, count: int = COUNT, seed: int = 1) -> Outcome:
    """Assert that a run beside hostile peers is as good as without them."""
    outcome = attacked(Setting(kind, count, seed, SECONDS))
    undisturbed = alone(seed, SECONDS)
    assert outcome.violations == []
    assert outcome.policies >= PACE * undisturbed.policies, outcome
    assert not outcome.honest_failed, "an honest submission was refused"
    assert not any(name.startswith("worker") for name in outcome.evicted)
    return outcome


def caught_beside(validator: str, workers: str, by: str) -> Outcome:
    """Assert that hostile workers beside a hostile validator are refused `by`, and evicted."""
    outcome = attacked(Setting(validator, COUNT, seconds=SECONDS, accomplices=workers))
    assert outcome.violations == []
    assert outcome.failed[by] > 0
    assert len(outcome.evicted) == COUNT and outcome.hostile_credit == 0, outcome
    assert not outcome.honest_failed
    return outcome


def caught(
    kind: str,
    by: str,
    *,
    evicted: bool = False,
    credit: int | None = None,
    count: int = COUNT,
    seed: int = 1,
) -> Outcome:
    """Assert that hostile peers are reported by an event or check `by`, too.

    `credit` bounds the tokens they are credited; `evicted` says that all of them are.
    """
    outcome = harmless(kind, count=count, seed=seed)
    assert outcome.said[by] + outcome.failed[by] > 0, outcome
    if evicted:
        assert len(outcome.evicted) == count, outcome.evicted
    if credit is not None:
        assert outcome.hostile_credit <= credit, outcome.credited
    return outcome
