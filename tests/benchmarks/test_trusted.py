"""Trusted peers with more workers than connections."""

from __future__ import annotations

import pytest

from benchmarks.operation import trusted
from swarm.transport import limits

WORKERS = 30
CONNECTIONS = 24


@pytest.mark.slow
def test_workers_share_the_connections_of_trusted_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody is admitted and keeps its lease, and every visit to a validator succeeds."""
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", CONNECTIONS)
    monkeypatch.setattr(trusted, "JOIN_SECONDS", 5.0)
    monkeypatch.setattr(trusted, "SETTLE_SECONDS", 60.0)
    monkeypatch.setattr(trusted, "MEASURED_SECONDS", 60.0)
    result = trusted.measured(WORKERS)
    assert result.violations == []
    assert result.admitted_seconds.count == WORKERS
    assert result.connections_trusted.most <= CONNECTIONS
    assert result.new_connections > 0  # closed ones are made again
    assert result.visits > 0
    assert (result.visits_failed, result.silent, result.leases_lost) == (0, 0, 0)
