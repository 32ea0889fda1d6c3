"""Odd numbers only, so that they wait for numbers that never come and the trainer counts on them.

Harmless: only a worker's next number is acknowledged, and the trainer counts on nothing else.

Cost: a message for each announcement, within the sender's rate.
"""

from __future__ import annotations

from tests.attacks.simulated import harmless


def test_it_is_harmless() -> None:
    harmless("staller")
