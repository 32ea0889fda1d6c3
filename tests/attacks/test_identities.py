"""Attacks by identities, which cost nothing."""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught, harmless

pytestmark = pytest.mark.slow


def test_garbage_under_new_keys() -> None:
    """Files that cannot be parsed, by a peer that returns with a new key after each eviction.

    Caught by `schema` each time, a proven fault.

    Cost: the swarm reads one file for each identity, and logs one verdict and one eviction.
    """
    caught("garbage-returner", "schema", credit=0)


def test_ground_identities() -> None:
    """An entry, or an identity, ground after the nonce is known, so that prompts and noise suit the
    cheat.

    Caught by `entry`: a submission is drawn with the entry that a trusted peer's secret gives the
    identity when it is admitted.

    Cost: a message for each announcement; an admission for each identity that is tried.
    """
    caught("nonce-grinder", "entry", credit=0)


def test_idle_crowd() -> None:
    """A crowd of identities on one machine that take slots and deliver nothing.

    Harmless: a network has `admissions.range_max` slots, and an idle identity loses its slot.

    Cost: memory of the slots; a heartbeat's work every five seconds for each identity.
    """
    harmless("idle-identities", count=1)


def test_new_keys() -> None:
    """An evicted cheat returns at once with a new key, again and again.

    Caught by `proofs` each time: all work of a new identity is recomputed, and none is credited.

    Cost: the swarm recomputes one submission for each identity; the cheat its work and an
    admission.
    """
    caught("returner", "proofs", credit=0)
