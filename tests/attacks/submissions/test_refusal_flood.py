"""Announcements of invented files, twenty a second to each validator, to have refusals signed,
logged and gossiped.

Harmless: a refused announcement enters no log and no gossip, and answers have a quota.

Cost: one signature check for each announcement, within the sender's rate.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("verdict-flooder")
