"""Another worker's rollouts under the cheat's own name: copied, replayed, or shared between Sybils.

Caught by `header` or `prompts`, proven faults, since seeds and so prompts follow from the worker's
id, step and number; by `sampling` and *text* if the prompts happen to agree.

Cost: the swarm reads the file; the cheat's identity.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from peers.calibration.work import HandedIn
from swarm.jobs import SubmissionOrder
from swarm.wire.identity import Identity
from swarm.wire.manifest import Sampling
from tests.attacks.cheats import Generates, Work
from tests.attacks.models import Arena
from tests.orders import submission_order

OTHER = Identity(b"another worker".ljust(32)).peer_id


def test_byte_for_byte_the_makers_file(arena: Arena) -> None:
    order = arena.order(0)
    header, rollouts = arena.honest_file(submission_order(order, worker=OTHER))
    found, _ = arena.judge(order, rollouts, header)
    assert (found.failed, found.proven_fault) == ("header", True)
    arena.accepts_honest_work()


def test_under_a_header_of_its_own(arena: Arena) -> None:
    order = arena.order(0)
    _, rollouts = arena.honest_file(submission_order(order, worker=OTHER))
    arena.proves_fault("prompts", rollouts, order)


def test_its_own_work_of_another_step_or_number(arena: Arena) -> None:
    order = arena.order(3)
    for other in (arena.order(2), arena.order(3, step=2, nonce=b"2" * 32)):
        _, rollouts = arena.honest_file(other)
        arena.proves_fault("prompts", rollouts, order)
        header = msgspec.structs.replace(arena.stage.engine._header(other))
        found, _ = arena.judge(order, rollouts, header)
        assert (found.failed, found.proven_fault) == ("header", True)


@pytest.mark.parametrize(
    "copied", [{"worker": OTHER}, {"step": 1, "nonce": b"1" * 32}], ids=["another", "earlier"]
)
def test_answers_to_the_same_prompts(arena: Arena, copied: dict[str, Any]) -> None:
    """As where a run has few tasks: the prompts agree, the noise does not.

    Another worker's answers to a policy in use are recognised as copies, and so recomputed. Those
    of an earlier step may be forgotten by then: they are recomputed like any fake.
    """

    def copies(work: Work, sampling: Sampling, order: SubmissionOrder) -> HandedIn:
        seed = submission_order(order, **copied).seed()
        return Generates(arena.engine).submit(replace(work, seed=seed), sampling)

    met = arena.evicts(copies, 300)
    assert met.accepted == 0 and met.failed["sampling"] == 1
